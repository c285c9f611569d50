"""A sum over the ranks that is whole only where code reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smp.modules.late import LateTensor
from smp.tensor_parallel import regions


class LateSum(LateTensor):
    """The result of a row in a block with own batches, summed when code reads it.

    Each function that needs its numbers gets the sum, an ordinary tensor that all of them share. If
    no code has read it at the end of the block, each rank gets its own part of the sum by one
    reduce-scatter. Gradients go back to the term in any case.
    """

    origin = (
        "what a layer gives that a plan splits by input features (rowwise; the plan can leave it "
        "out)"
    )
    _term: Tensor
    _row: nn.Module

    @staticmethod
    def of(term: Tensor, row: nn.Module) -> LateSum:
        """Returns the sum of a term over the ranks; the sum's gradient is the term's, too.

        Args:
            term: ``[samples of all ranks, *]``, a plain tensor.
            row: row that computed it; if code reads this sum, the row's next one is made at once.
        """
        late: LateSum = _Late.apply(term)
        late._term, late._row = term, row
        return late

    def _read(self) -> Tensor:
        self._row.__dict__["_smp_sums_late"] = False
        return regions.reduce(self._term)

    @property
    def source(self) -> Tensor:
        return self._term

    def own_samples(self) -> Tensor | None:
        """Returns this rank's part along dim 0, or None if the sum was read. Collective."""
        return None if self.was_read else regions.reduce_scatter(self._term, 0)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor) -> Tensor:
        late: Tensor = Tensor._make_wrapper_subclass(
            LateSum, term.shape, dtype=term.dtype, device=term.device
        )
        return late

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class OfFirstRank(torch.autograd.Function):
    """The identity for a bias on the first rank, and zeros on the others.

    On every rank the bias gets the gradient of the sum.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return bias.view_as(bias) if regions.rank() == 0 else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]
