"""Values that the host knows of tensors on a device, because it is what has uploaded them.

To look at a tensor on a device is to wait for the device. What a model is called with comes from
the host in most cases, so that its values can be looked at there.
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

# By tensors on a device: those on the host, and the versions of both when they were equal.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def upload(arguments: Any, device: torch.device) -> Any:
    """Arguments with tensors, at any depth of containers, on a device; the host does not wait.

    The host goes on knowing the values of integers and booleans (`on_host`): tokens, masks,
    positions.
    """

    def moved(tensor: Tensor) -> Tensor:
        there = tensor.to(device, non_blocking=True)
        remember(there, tensor)
        return there

    return pytree.tree_map_only(Tensor, moved, arguments)


def remember(tensor: Tensor, host: Tensor) -> None:
    """Notes that a tensor has the values of one on the host, for as long as nobody writes to them.

    Nothing is noted of numbers with fractions, which are many, and of tensors whose changes cannot
    be seen (``torch.inference_mode``).
    """
    can_be_told = _is_plain(tensor) and not tensor.is_cpu and _is_plain(host) and host.is_cpu
    if not can_be_told or host.is_floating_point() or host.is_complex():
        return
    if tensor.is_inference() or host.is_inference():
        return
    _known[tensor] = (tensor._version, host, host._version)


def on_host(tensor: Tensor) -> Tensor | None:
    """The values of a tensor if the host has them; None if it would have to wait, or cannot know.

    For a tensor on the CPU that is the tensor.
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
    """Applies a function, to the values that the host knows as well."""
    result = function(tensor)
    host = None if tensor.is_cpu else on_host(tensor)
    if host is not None:
        remember(result, function(host))
    return result


def is_known_zero(tensor: Tensor) -> bool:
    """Does the host know that all elements are zero? It waits for no device to find out."""
    host = on_host(tensor)
    if host is None:
        return False
    with torch.no_grad(), _disable_current_modes():  # type: ignore[no-untyped-call]
        return not bool(host.any())


def _is_plain(tensor: Tensor) -> bool:
    """Is it a tensor, and not something that stands for one?"""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided
