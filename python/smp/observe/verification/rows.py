"""Reduces a tensor of any size to a few hundred numbers for a comparison."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from smp.modules.late import LateTensor
from smp.modules.packed import is_packed
from smp.pipeline.remote_tensor import RemoteTensor

SIZE = 256
#: sum and norm of a tensor
Stamp = tuple[float, float]
_CHUNK = 4096 * SIZE  # elements that are worked on at once
_signs: dict[torch.device, Tensor] = {}  # +1 and -1, the same on all ranks
_signs_lock = threading.Lock()


@dataclass(frozen=True)
class Row:
    """The numbers that are kept of a tensor, in float64.

    Rows are linear: the row of a sum is the sum of the rows.

    Attributes:
        shape: shape of the tensor.
        numbers: elements of the tensor, or a `sketch` of more than `SIZE` elements.
    """

    shape: tuple[int, ...]
    numbers: Tensor

    def plus(self, other: Row) -> Row:
        return Row(self.shape, self.numbers + other.numbers)

    def on_host(self) -> Row:
        return Row(self.shape, self.numbers.cpu())


def row_of(value: Any) -> Row | None:
    """Returns the row of a value on its device; None for values without numbers in this process."""
    if not _is_plain(value):
        return None
    with _plainly(value):
        shape = tuple(value.shape)
        if value.numel() > SIZE or value.is_complex():
            return Row(shape, sketch(value))
        return Row(shape, value.detach().reshape(-1).to(torch.float64, copy=True))


def stamp(tensor: Tensor) -> Stamp:
    """Returns sum and norm, which are enough to notice that values have changed."""
    with torch.no_grad():
        flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if not _is_plain(flat):
            return 0.0, 0.0
        wide = flat if flat.is_floating_point() else flat.to(torch.float64)
        total = wide.sum(dtype=torch.float64)
        return float(total), float(torch.linalg.vector_norm(wide, dtype=torch.float64))


def are_near(first: Stamp, second: Stamp, share: float = 0.0) -> bool:
    """Returns whether two stamps differ by no more than a share; two NaN are equal."""
    bound = share * max(map(abs, (*first, *second)))
    return all(
        a == b or (a != a and b != b) or abs(a - b) <= bound
        for a, b in zip(first, second, strict=True)
    )


def sketch(tensor: Tensor) -> Tensor:
    """Sums the elements under random signs, in float64, on the tensor's device.

    The norm of a sketch is that of the tensor within about a tenth, and the same holds for
    differences.
    """
    with _plainly(tensor):
        flat = tensor.detach()
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        flat = flat.reshape(-1)
        result = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
        signs = _signs_on(flat.device)
        for start in range(0, flat.numel(), _CHUNK):
            _add(result, flat[start : start + _CHUNK], signs)
        return result


def _add(result: Tensor, chunk: Tensor, signs: Tensor) -> None:
    # Sums in float64, because the last bits of large tensors count.
    wide = chunk if chunk.dtype in (torch.float32, torch.float64) else chunk.to(torch.float32)
    signed = wide * signs[: wide.numel()]
    whole = wide.numel() // SIZE * SIZE
    result += signed[:whole].view(-1, SIZE).sum(0, dtype=torch.float64)
    rest = signed[whole:]
    result[: rest.numel()] += rest


def _signs_on(device: torch.device) -> Tensor:
    with _signs_lock:
        if device not in _signs:
            generator = torch.Generator().manual_seed(20_011)  # leaves the global one alone
            bits = torch.randint(0, 2, (_CHUNK,), generator=generator)
            _signs[device] = (bits * 2 - 1).to(torch.float32).to(device)
        return _signs[device]


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a tensor with values in this process that can be summed."""
    return (
        isinstance(value, Tensor)
        and not isinstance(value, RemoteTensor | LateTensor)  # reading one communicates
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
        and not is_packed(value)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


@contextlib.contextmanager
def _plainly(tensor: Tensor) -> Iterator[None]:
    """Runs operators of the block without gradients, modes of the caller, and autocast."""
    with (
        torch.no_grad(),
        _disable_current_modes(),  # type: ignore[no-untyped-call]
        torch._C.DisableTorchFunctionSubclass(),
        torch.autocast(tensor.device.type, enabled=False),
    ):
        yield
