"""Tensors inside of transforms of ``torch.func``: vmap, grad, jvp."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree


def is_transformed(value: Any) -> bool:
    """Is one of the tensors in it that of a transform? Such a tensor lives in its thread only."""
    return any(
        isinstance(leaf, Tensor) and _functorch.is_functorch_wrapped_tensor(leaf)
        for leaf in pytree.tree_leaves(value)
    )


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor behind those of transforms."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
