"""Writes to parameters on the meta device, which are repeated when these become real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _View:
    """A view of the parameter that is written to."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Number:
    """A tensor full of one number, such as ``weight[0] = 1.0`` makes."""

    size: tuple[int, ...]
    value: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Write:
    """An operator call that writes to a parameter.

    Attributes:
        func: the operator.
        arguments: positional and keyword arguments, with views in place of the parameter; None if
            it reads other delayed tensors, or the parameter's layout differs from the real one's.
    """

    func: OpOverload
    arguments: tuple[Any, Any] | None

    @property
    def name(self) -> str:
        """Returns the operator's name, for messages."""
        return str(self.func._schema.name).removeprefix("aten::")

    def repeat(self, parameter: Tensor) -> None:
        """Repeats the write; ``arguments`` are not None.

        Args:
            parameter: real and contiguous.
        """
        assert self.arguments is not None

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return parameter.detach().as_strided(leaf.size, leaf.stride, leaf.offset)
            if isinstance(leaf, _Number):
                device = parameter.device
                return torch.full(leaf.size, leaf.value, dtype=leaf.dtype, device=device)
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.to(parameter.device)
            return leaf

        args, kwargs = pytree.tree_map(filled, self.arguments)
        self.func(*args, **kwargs)


def write_of_value(real: Tensor, delayed: Tensor) -> Write:
    """Returns the write that gives a parameter the values of another tensor.

    Args:
        real: tensor with the values; kept if they are not all the same.
        delayed: parameter on the meta device.
    """
    whole = _View(tuple(delayed.shape), delayed.stride(), 0)
    first = real.flatten()[0]
    if bool((real == first).all()):
        return Write(torch.ops.aten.fill_.Scalar, ((whole, first.item()), {}))
    return Write(torch.ops.aten.copy_.default, ((whole, real), {}))


def write_of_call(
    func: OpOverload,
    args: Any,
    kwargs: Any,
    written: Tensor,
    number_in: Callable[[Tensor], float | None],
) -> Write:
    """Returns the write that repeats an operator's effect on another tensor.

    Args:
        func, args, kwargs: the call.
        written: one of the arguments, on the meta device.
        number_in: returns the number that another tensor on the meta device is full of, or None.
    """
    storage = written.untyped_storage()._cdata
    is_known = True

    def noted(leaf: Any) -> Any:
        nonlocal is_known
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.untyped_storage()._cdata == storage:
            is_known &= leaf.dtype == written.dtype
            return _View(tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()))
        if not leaf.is_meta:
            return leaf.detach().clone()
        number = number_in(leaf)
        is_known &= number is not None
        return None if number is None else _Number(tuple(leaf.shape), number, leaf.dtype)

    arguments = pytree.tree_map(noted, (args, dict(kwargs)))
    return Write(func, arguments if is_known else None)
