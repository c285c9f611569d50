"""A sequence of which this rank has a part, whole only where code reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smp.context_parallel import regions
from smp.context_parallel.parts import even_parts
from smp.modules.late import LateTensor


class LateWhole(LateTensor):
    """The result of a block that computed this rank's part of the tokens.

    Each function that needs its numbers gets all tokens, gathered once. The next block takes the
    part as it is, so between blocks nothing is exchanged.
    """

    origin = "what a block gives that computes a part of the tokens (context_parallel_degree)"
    _part: Tensor
    _dim: int

    @staticmethod
    def of(part: Tensor, dim: int, extent: int) -> LateWhole:
        """Returns the whole of a part.

        Args:
            part: this rank's part.
            dim: dim along which it is a part.
            extent: size of the whole along this dim.
        """
        late: LateWhole = _Late.apply(part, dim, extent)
        late._part, late._dim = part, dim
        return late

    def _read(self) -> Tensor:
        return regions.gather(self._part, self._dim, self._extent())

    def _extent(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return int(self.size(self._dim))

    def part_along(self, dim: int) -> Tensor | None:
        """Returns the part, or None if it is one along another dim."""
        return self._part if dim == self._dim else None


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, extent: int) -> Tensor:
        ctx.dim = dim
        shape = list(part.shape)
        shape[dim] = extent
        late: Tensor = Tensor._make_wrapper_subclass(
            LateWhole, shape, dtype=part.dtype, device=part.device
        )
        return late

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ranks = regions.group()
        sizes = even_parts(grads[0].shape[ctx.dim], ranks.size)
        return ranks.reduce_scatter(grads[0], ctx.dim, sizes), None, None
