"""A sequence of which this rank has a part, whole only where code reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smp.context_parallel import regions
from smp.modules.late import LateTensor


class LateWhole(LateTensor):
    """The result of a block that computed this rank's part of the tokens.

    Each function that needs its numbers gets all tokens, gathered once. The next block takes the
    part as it is, so between blocks nothing is exchanged.
    """

    origin = "what a block gives that computes a part of the tokens (context_parallel_degree)"
    _part: Tensor
    _dim: int
    _sizes: list[int]
    _node: Any
    _first_version: int = 0

    @staticmethod
    def of(part: Tensor, dim: int, sizes: list[int], extent: int) -> LateWhole:
        """Returns the whole of a part.

        Args:
            part: this rank's part.
            dim: dim along which it is a part.
            sizes: sizes of all parts.
            extent: size of the whole along this dim: the last positions of all parts.
        """
        late: LateWhole = _Late.apply(part, dim, sizes, extent)
        late._part, late._dim, late._sizes = part, dim, sizes
        with torch._C.DisableTorchFunctionSubclass():
            late._node = late.grad_fn
        return late

    def _read(self) -> Tensor:
        if not self._has_own_graph():
            with torch._C.DisableTorchFunctionSubclass():
                numbers: Tensor = _Numbers.apply(self)
                return numbers
        return self.gathered()

    def read(self) -> Tensor:
        is_first = self._numbers is None
        numbers = super().read()
        if is_first:
            self._first_version = numbers._version
        return numbers

    def gathered(self) -> Tensor:
        """Returns all tokens, by the graph of the part."""
        every = regions.gather(self._part, self._dim, self._sizes)
        extent = self._extent()
        more = sum(self._sizes) - extent
        return every.narrow(self._dim, more, extent) if more else every

    def _has_own_graph(self) -> bool:
        """Returns whether it still is the result of the block; a checkpoint makes it its own."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is self._node

    def _extent(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return int(self.size(self._dim))

    def part_along(self, dim: int) -> Tensor | None:
        """Returns the part; None if it is one along another dim, or not what code has made of it.

        Code may have changed the numbers in place, or hooked on to their gradient.
        """
        numbers = self._numbers
        if numbers is not None and (
            numbers._version != self._first_version
            or numbers._backward_hooks
            or (numbers.retains_grad and not numbers.is_leaf)
        ):
            return None
        return self._part if dim == self._dim and self._has_own_graph() else None


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, sizes: list[int], extent: int) -> Tensor:
        ctx.dim, ctx.sizes = dim, sizes
        shape = list(part.shape)
        shape[dim] = extent
        late: Tensor = Tensor._make_wrapper_subclass(
            LateWhole, shape, dtype=part.dtype, device=part.device
        )
        return late

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, dim = grads[0], ctx.dim
        more = sum(ctx.sizes) - grad.shape[dim]
        if more:
            shape = list(grad.shape)
            shape[dim] = more
            grad = torch.cat([grad.new_zeros(shape), grad], dim)
        own = regions.group().reduce_scatter(grad, dim, ctx.sizes)
        return own, None, None, None


class _Numbers(torch.autograd.Function):
    """The numbers of a tensor by its own graph."""

    @staticmethod
    def forward(ctx: Any, late: LateWhole) -> Tensor:
        return late.gathered()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]
