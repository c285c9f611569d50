"""Keeps host copies of values of tensors that the host has uploaded to a device.

Reading a tensor on a device has to wait for the device. The arguments of a model come from the host
in most cases, so that their values can be read there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

_PLAIN = (Tensor, torch.nn.Parameter)

# By tensor on a device: the tensor on the host, and the versions of both when they were equal.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def upload(arguments: Any, device: torch.device) -> Any:
    """Copies the tensors in arguments, at any depth of containers, to a device without waiting.

    Values of integers and booleans (tokens, masks, positions) remain known to the host; see
    `on_host`.
    """

    def moved(tensor: Tensor) -> Tensor:
        there = tensor.to(device, non_blocking=True)
        remember(there, tensor)
        return there

    return pytree.tree_map_only(Tensor, moved, arguments)


def remember(tensor: Tensor, host: Tensor) -> None:
    """Notes that a tensor has the values of a host tensor until one of them is written.

    Nothing is noted for floating-point and complex tensors, which are large, and for tensors whose
    changes cannot be seen (``torch.inference_mode``).
    """
    can_be_told = _is_plain(tensor) and not tensor.is_cpu and _is_plain(host) and host.is_cpu
    if not can_be_told or host.is_floating_point() or host.is_complex():
        return
    if tensor.is_inference() or host.is_inference():
        return
    _known[tensor] = (tensor._version, host, host._version)


def on_host(tensor: Tensor) -> Tensor | None:
    """Returns the values of a tensor if the host has them; None if they are not known without wait.

    A tensor on the CPU is returned itself.
    """
    if not _is_plain(tensor) or torch.compiler.is_compiling():
        return None
    if tensor.is_cpu:
        return tensor
    known = None if tensor.is_inference() else _known.get(tensor)
    if known is None:
        return None
    version, host, host_version = known
    assert isinstance(host, Tensor)
    return host if (version, host_version) == (tensor._version, host._version) else None


def mapped(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies a function to a tensor, and to its host copy if there is one."""
    result = function(tensor)
    host = None if tensor.is_cpu else on_host(tensor)
    if host is not None:
        remember(result, function(host))
    return result


def is_known_zero(tensor: Tensor) -> bool:
    """Returns whether a host copy shows, without waiting for a device, that all elements are 0."""
    host = on_host(tensor)
    if host is None:
        return False
    with torch.no_grad(), _disable_current_modes():  # type: ignore[no-untyped-call]
        return not bool(host.any())


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a value is an ordinary tensor, not one of a subclass."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided
