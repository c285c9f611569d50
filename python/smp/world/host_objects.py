"""Pickles host objects for other ranks: tensors are copied and arrive on the receiver's device.

A tensor in a message owns its elements only: a view does not drag its whole storage along, and a
CUDA tensor travels as CPU bytes, so that receiving never touches another rank's device.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
from typing import Any

import torch

from smp._device import is_accelerator

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def pack(obj: object) -> bytes:
    """Pickles an object."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def unpack(data: bytes, device: torch.device) -> Any:
    """Returns the object; tensors that were on a GPU are put on `device`.

    Args:
        data: bytes from `pack` on a rank of the same job.
        device: device of this rank.
    """
    return _Unpickler(io.BytesIO(data), device).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        # A device of another rank means the receiver's own.
        is_gpu = type(obj) is torch.device and is_accelerator(obj)
        return "gpu" if is_gpu else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if _is_plain(obj):
            is_parameter = type(obj) is torch.nn.Parameter
            return _rebuild, (*_elements(obj), obj.device, obj.requires_grad, is_parameter)
        if is_accelerator(obj.device):  # rare kinds are pickled by PyTorch, but from the CPU
            return _move, (obj.detach().cpu(), obj.device, obj.requires_grad)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> torch.device:
        return self._device


def pack_apart(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Pickles an object without the memory of plain tensors on the CPU, which is not copied.

    Args:
        obj: any picklable object, in which no tensor has a graph.

    Returns:
        bytes, and the memory of the tensors as uint8 `[n]`, to be put behind each other.
    """
    buffer = io.BytesIO()
    pickler = _ApartPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(obj)
    return buffer.getvalue(), pickler.parts


def unpack_apart(data: bytes, memory: torch.Tensor) -> Any:
    """Returns an object from `pack_apart`.

    Args:
        data: bytes that it has returned.
        memory: memory of its tensors.
    """
    return _ApartUnpickler(io.BytesIO(data), memory).load()


class _ApartPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.parts: list[torch.Tensor] = []
        self._num_bytes = 0

    def reducer_override(self, obj: Any) -> Any:
        if not (type(obj) is torch.Tensor and _is_plain(obj) and obj.device.type == "cpu"):
            return NotImplemented
        if obj.grad_fn is not None:
            raise ValueError("a tensor has a graph")
        plain = _plain(obj)
        begin, self._num_bytes = self._num_bytes, self._num_bytes + plain.nbytes
        self.parts.append(plain.view(-1).view(torch.uint8))
        place = begin, self._num_bytes, obj.dtype, tuple(obj.shape), obj.requires_grad
        return _from_memory, place


class _ApartUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: torch.Tensor) -> None:
        super().__init__(file)
        self._memory = memory

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return functools.partial(found, self._memory) if found is _from_memory else found


def _from_memory(
    memory: torch.Tensor,
    begin: int,
    end: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    own = memory[begin:end].clone()  # aligned, and no part of the whole memory
    return own.view(dtype).view(shape).requires_grad_(requires_grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _TENSOR_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _elements(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    plain = _plain(tensor)
    num_bytes = plain.numel() * plain.element_size()
    data = ctypes.string_at(plain.data_ptr(), num_bytes) if num_bytes else b""
    return data, plain.dtype, tuple(plain.shape)


def _rebuild(
    data: bytes,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))
    tensor = tensor.to(device)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _move(tensor: torch.Tensor, device: torch.device, requires_grad: bool) -> torch.Tensor:
    return tensor.to(device).requires_grad_(requires_grad)
