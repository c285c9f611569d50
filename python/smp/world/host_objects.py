"""Pickles host objects for other ranks: tensors are copied and arrive on the receiver's device.

A tensor in a message owns its elements only: a view does not drag its whole storage along, and a
CUDA tensor travels as CPU bytes, so that receiving never touches another rank's device.
"""

from __future__ import annotations

import ctypes
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
        is_plain = (
            type(obj) in _TENSOR_TYPES
            and obj.layout is torch.strided
            and not obj.is_quantized
            and not obj.is_meta
        )
        if is_plain:
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


def _elements(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
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
