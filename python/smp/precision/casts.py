"""Casts outputs of a 16-bit model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp.modules.flat import is_cache

_HALVES = (torch.float16, torch.bfloat16)


def cast_outputs(outputs: Any) -> Any:
    """Returns outputs with 16-bit tensors cast to float32, at any depth of containers.

    Attention caches are not cast. Handles of tensors on other ranks are cast there, and lazy
    outputs are cast when they are read.
    """
    return pytree.tree_map(_to_float32, outputs, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return is_cache(value) or _is_cast_when_read(value)


def _is_cast_when_read(value: Any) -> bool:
    return getattr(type(value), "is_cast_when_read", False)


def _to_float32(value: Any) -> Any:
    if _is_cast_when_read(value):
        return value.float() if value.dtype in _HALVES else value
    if isinstance(value, Tensor) and value.dtype in _HALVES:
        return value.float()
    return value
