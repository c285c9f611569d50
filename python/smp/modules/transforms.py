"""Detects tensors of transforms of ``torch.func`` (vmap, grad, jvp) and of forward-mode AD."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree


def is_transformed(value: Any) -> bool:
    """Returns whether a value contains a tensor of a transform, which lives in its thread only.

    A tensor with a tangent of ``torch.autograd.forward_ad`` counts as such a tensor.
    """
    return any(
        isinstance(leaf, Tensor)
        and (_functorch.is_functorch_wrapped_tensor(leaf) or has_tangent(leaf))
        for leaf in pytree.tree_leaves(value)
    )


def has_tangent(tensor: Tensor) -> bool:
    """Returns whether a tensor carries a derivative along a direction."""
    if forward_ad._current_level < 0:  # type: ignore[attr-defined]
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor inside the wrappers of transforms."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
