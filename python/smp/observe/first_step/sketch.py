"""Reduces a tensor of any size to a few hundred numbers for a comparison."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from smp.pipeline.remote_tensor import RemoteTensor

SIZE = 256
_CHUNK = 4096 * SIZE  # elements that are worked on at once


class _Signs:
    """A sequence of +1 and -1 per device, which is the same on all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device) -> Tensor:
        with self._lock:
            signs = self._of.get(device)
            if signs is None:
                generator = torch.Generator().manual_seed(20_011)  # leaves the global one alone
                bits = torch.randint(0, 2, (_CHUNK,), generator=generator)
                signs = self._of[device] = (bits * 2 - 1).to(torch.float32).to(device)
            return signs


_signs = _Signs()


def is_plain(value: Any) -> bool:
    """Returns whether a value is a tensor with values in this process that can be summed."""
    if not isinstance(value, Tensor) or isinstance(value, RemoteTensor):
        return False
    return (
        value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
        and not value.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def sketch(tensor: Tensor) -> Tensor:
    """Sums the elements under random signs, in float64, on the tensor's device.

    The sketch is linear: the sketch of a sum is the sum of the sketches. Its norm is that of the
    tensor within about a tenth, and the same holds for differences. A tensor of up to `SIZE`
    elements is its own sketch.

    Args:
        tensor: tensor of any dtype, for which :func:`is_plain` is true.
    """
    with (
        torch.no_grad(),
        _disable_current_modes(),  # type: ignore[no-untyped-call]
        torch._C.DisableTorchFunctionSubclass(),
        torch.autocast(tensor.device.type, enabled=False),
    ):
        flat = tensor.detach()
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        flat = flat.reshape(-1)
        result = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
        signs = _signs.get(flat.device)
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


def stamp(tensor: Tensor) -> tuple[float, float]:
    """Returns sum and norm, which are enough to notice that values have changed."""
    with torch.no_grad():
        flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if not is_plain(flat):
            return 0.0, 0.0
        wide = flat if flat.is_floating_point() else flat.to(torch.float64)
        total = wide.sum(dtype=torch.float64)
        return float(total), float(torch.linalg.vector_norm(wide, dtype=torch.float64))
