"""Pickles host objects for other ranks: tensors go by value, and come on the receiver's device.

A tensor in a message owns its elements only: a view does not drag its whole storage along, and a
CUDA tensor travels as CPU bytes, so that receiving never touches another rank's device.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smp._device import is_accelerator

#: Size from which the memory of a tensor is sent apart from the pickle of a message. Smaller ones
#: would be copied in the mailbox, too.
_MIN_APART_BYTES = 32 << 10

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def pack(obj: object) -> bytes:
    """Pickles an object."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def pack_message(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Pickles an object without the memory of large tensors, which is copied only from a GPU.

    Returns:
        bytes, and the memory of the tensors as uint8 `[n]`, for `unpack`.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, _MIN_APART_BYTES)
    pickler.dump(obj)
    return buffer.getvalue(), pickler.parts


def unpack(data: bytes, device: torch.device, parts: Sequence[torch.Tensor] = ()) -> Any:
    """Returns the object; tensors that were on a GPU are put on `device`.

    Args:
        data: bytes from `pack` or `pack_message` on a rank of the same job.
        device: device of this rank.
        parts: memory from `pack_message`, which becomes that of the object's tensors.
    """
    begins = itertools.accumulate((part.numel() for part in parts), initial=0)
    places = dict(zip(begins, parts, strict=False))
    return _Unpickler(io.BytesIO(data), device, lambda begin, _: places[begin]).load()


def pack_apart(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Pickles an object without the memory of plain tensors, which is copied only from a GPU.

    Args:
        obj: any picklable object, in which no tensor has a graph.

    Returns:
        bytes, and the memory of the tensors as uint8 `[n]`, to be put behind each other.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, 0, takes_graphs=False)
    pickler.dump(obj)
    return buffer.getvalue(), pickler.parts


def unpack_apart(data: bytes, memory: torch.Tensor, device: torch.device) -> Any:
    """Returns an object from `pack_apart`.

    Args:
        data: bytes that it has returned.
        memory: memory of its tensors.
        device: device of this rank.
    """
    # Aligned, and no part of the whole memory.
    at = functools.partial(_copy_of, memory)
    return _Unpickler(io.BytesIO(data), device, at).load()


def _copy_of(memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return memory[begin:end].clone()


class _Pickler(pickle.Pickler):
    """Pickles tensors by value.

    Args:
        file: file of the pickle.
        min_apart_bytes: size from which the memory of a tensor is not part of the pickle; None:
            all are part of it.
        takes_graphs: take tensors with a graph, which stays here.
    """

    def __init__(
        self, file: io.BytesIO, min_apart_bytes: int | None = None, takes_graphs: bool = True
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.parts: list[torch.Tensor] = []
        self._num_bytes = 0
        self._min_apart_bytes, self._takes_graphs = min_apart_bytes, takes_graphs

    def persistent_id(self, obj: Any) -> str | None:
        # A device of another rank means the receiver's own.
        is_gpu = type(obj) is torch.device and is_accelerator(obj)
        return "gpu" if is_gpu else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if obj.grad_fn is not None and not self._takes_graphs:
            raise ValueError("a tensor has a graph")
        if _is_plain(obj):
            plain = _plain(obj)
            about = obj.device, obj.requires_grad, type(obj) is torch.nn.Parameter
            form = plain.dtype, tuple(plain.shape), *about
            if self._min_apart_bytes is None or plain.nbytes < self._min_apart_bytes:
                return _rebuild, (_elements(plain), *form)
            begin, self._num_bytes = self._num_bytes, self._num_bytes + plain.nbytes
            self.parts.append(plain.view(-1).view(torch.uint8))
            return _from_part, (begin, self._num_bytes, *form)
        if is_accelerator(obj.device):  # rare kinds are pickled by PyTorch, but from the CPU
            return _move, (obj.detach().cpu(), obj.device, obj.requires_grad)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        device: torch.device,
        part_at: Callable[[int, int], torch.Tensor],
    ) -> None:
        super().__init__(file)
        self._device, self._part_at = device, part_at

    def persistent_load(self, pid: Any) -> torch.device:
        return self._device

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return functools.partial(found, self._part_at) if found is _from_part else found


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _TENSOR_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _elements(plain: torch.Tensor) -> bytes:
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], *about: Any) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))
    return _placed(tensor, *about)


def _from_part(
    part_at: Callable[[int, int], torch.Tensor],
    begin: int,
    end: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *about: Any,
) -> torch.Tensor:
    return _placed(part_at(begin, end).view(dtype).view(shape), *about)


def _placed(
    tensor: torch.Tensor, device: torch.device, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    tensor = tensor.to(device)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _move(tensor: torch.Tensor, device: torch.device, requires_grad: bool) -> torch.Tensor:
    return tensor.to(device).requires_grad_(requires_grad)
