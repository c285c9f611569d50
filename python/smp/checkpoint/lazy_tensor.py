"""Tensors that have a shape, a dtype and a recipe instead of values, so that translators of state
dicts never have a whole model in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class LazyTensor(Tensor):
    """A tensor with shape and dtype only; operators on it return others. :meth:`make` computes.

    Results are computed from the beginning each time. Changes in place and reads of values raise.

    Attributes:
        make: returns the tensor.
        leaves: names of the tensors that it is made of.
    """

    make: Callable[[], Tensor]
    leaves: frozenset[str]
    _meta: Tensor

    @staticmethod
    def __new__(
        cls: type[LazyTensor], meta: Tensor, make: Callable[[], Tensor], leaves: Iterable[str]
    ) -> LazyTensor:
        result = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("meta")
        )
        result._meta = meta
        result.make = make
        result.leaves = frozenset(leaves)
        return result

    @classmethod
    def leaf(
        cls, name: str, shape: Iterable[int], dtype: torch.dtype, make: Callable[[], Tensor]
    ) -> LazyTensor:
        """Returns a tensor that others are made of."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), make, (name,))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype}, of {sorted(self.leaves)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise TypeError(f"{func} changes a tensor of a state dict that is not loaded yet")
        flat, spec = pytree.tree_flatten((args, kwargs))
        metas = [_meta_of(item) for item in flat]
        meta_args, meta_kwargs = pytree.tree_unflatten(metas, spec)
        output = func(*meta_args, **meta_kwargs)
        leaves = frozenset().union(*(t.leaves for t in flat if isinstance(t, LazyTensor)))

        def compute() -> Any:
            made = [item.make() if isinstance(item, LazyTensor) else item for item in flat]
            made_args, made_kwargs = pytree.tree_unflatten(made, spec)
            return func(*made_args, **made_kwargs)

        def element(i: int) -> Any:
            return compute()[i]

        if isinstance(output, list | tuple):
            return type(output)(
                cls(item, functools.partial(element, i), leaves) for i, item in enumerate(output)
            )
        return cls(output, compute, leaves) if isinstance(output, Tensor) else output


def _meta_of(item: Any) -> Any:
    if isinstance(item, LazyTensor):
        return item._meta
    if isinstance(item, Tensor):
        return item.to("meta")
    return torch.device("meta") if isinstance(item, torch.device) else item
