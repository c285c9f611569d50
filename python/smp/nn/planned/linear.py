"""Linear layers of which a rank holds a part, in place of those of the model's own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

import smp._C as _C
from smp.dropout.blocks import column_runs, row_runs
from smp.dropout.parts import Share
from smp.nn.layout import Layout, uneven
from smp.nn.module import DistributedModule
from smp.nn.planned.calls import for_columns, sums_late
from smp.nn.planned.late import LateSum, OfFirstRank
from smp.tensor_parallel import reading, regions
from smp.tensor_parallel.products import product


class PlannedPart(DistributedModule):
    """A module whose class was replaced by this one, with parts of some parameters.

    Attributes:
        _smp_layout: layout of the model.
        _smp_sizes: sizes of the parts, by rank.
        _smp_inside: the module is in a block, where activations are common.
        _smp_query_heads: query heads of this rank, for a column of attention.
        _smp_splits: splits of parameters, by name; code outside of smp reads these whole.
    """

    _smp_layout: Layout
    _smp_sizes: Sequence[int]
    _smp_inside: bool
    _smp_query_heads: Share | None = None
    _smp_splits: dict[str, reading.Split] = {}

    @property
    def _has_own(self) -> bool:
        """Returns whether it reads samples that other ranks do not have."""
        return self._smp_layout.has_own_batches and not self._smp_inside

    def _matrix(self) -> Tensor:
        """Returns this rank's part of the weight of a linear layer, ``[out, in]``."""
        weight: Tensor = self.weight
        return weight

    def _column(self, x: Tensor) -> Tensor:
        """Returns own output features of the product with ``[*, in]``, with the bias."""
        return product(self, x, self._matrix(), self.bias, splits_in=False)

    def _row(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns this rank's term of the product, from own input features ``[*, in]``."""
        return product(self, x, self._matrix(), bias, splits_in=True)

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name in self._smp_splits and value is not None and reading.is_outside():
            return reading.whole(value, self._smp_splits[name])
        return value


class PlannedColumn(PlannedPart, nn.Linear):
    """An ``nn.Linear`` with some of the output features: ``colwise``."""

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps common ``[*, in]`` to ``[*, own part of out]``. Collective in backward."""
        column_runs(input, self._smp_sizes, self._smp_query_heads)
        return self._column(for_columns(input))


class PlannedRow(PlannedPart, nn.Linear):
    """An ``nn.Linear`` with some of the input features and the whole bias: ``rowwise``.

    Attributes:
        _smp_sums_late: whether the result may be a :class:`LateSum` in a block with own batches;
            False once code in the block has read one, which costs more than a sum at once.
    """

    _smp_sums_late: bool = True

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps ``[*, own part of in]`` to common ``[*, out]``. Collective."""
        if input.shape[-1] != self._matrix().shape[1]:
            raise RuntimeError(
                f"{_C.rank_prefix()}a layer that a plan splits by input features (rowwise) got "
                f"{input.shape[-1]} features; expected the {self._matrix().shape[1]} of this rank "
                f"({list(self._smp_sizes)} of {self.in_features}): code in between makes something "
                "else of what the columns give; leave these parts out of the plan"
            )
        row_runs()
        if self._smp_sums_late and sums_late() and not has_hooks(self):
            bias = None if self.bias is None else OfFirstRank.apply(self.bias)
            term = self._row(input, bias)
            return LateSum.of(term, self) if type(term) is Tensor else regions.reduce(term)
        y = regions.reduce(self._row(input))
        return y if self.bias is None else y + self.bias.to(y.dtype)


def has_hooks(part: nn.Module) -> bool:
    """Returns whether hooks read the part's output or gradients."""
    hooks = ("forward_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(part, f"_{name}") or getattr(module, f"_global_{name}") for name in hooks)


class PlannedGatheredColumn(PlannedPart, nn.Linear):
    """An ``nn.Linear`` with some output features that returns all: ``colwise_gather_output``."""

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps ``[*, in]`` to ``[*, out]``. Collective."""
        x = input if input.dim() > 1 else input[None]
        last, sizes = x.dim() - 1, uneven(self._smp_sizes)
        if self._has_own:
            x = regions.gather(x, 0, grad="sum")
            y = self._column(x)
            y = regions.exchange(y, 0, last, concat_sizes=sizes)
        else:
            y = self._column(for_columns(x))
            y = regions.gather(y, last, sizes, grad="own")
        return y if input.dim() > 1 else y[0]


class PlannedSplitRow(PlannedPart, nn.Linear):
    """An ``nn.Linear`` with some input features that takes all: ``rowwise_split_input``."""

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps ``[*, in]`` to ``[*, out]``. Collective."""
        x = input if input.dim() > 1 else input[None]
        last, sizes = x.dim() - 1, uneven(self._smp_sizes)
        if self._has_own:
            x = regions.exchange(x, last, 0, split_sizes=sizes)
            y = regions.reduce_scatter(self._row(x), 0)
        else:
            y = regions.reduce(self._row(regions.scatter(x, last, sizes)))
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y if input.dim() > 1 else y[0]


class PlannedHeads(PlannedPart, nn.Linear):
    """An ``nn.Linear`` held whole, of which a rank computes the heads that its queries need.

    It serves keys and values with fewer heads than ranks, and matrices of queries, keys and values
    of which a rank's heads are no slice.

    Attributes:
        _smp_heads: numbers of these heads in the weight, ``[n]``.
        _smp_unit: features of a head.
    """

    _smp_heads: tuple[int, ...]
    _smp_unit: int

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps common ``[*, in]`` to ``[*, features of the heads]``. Collective in backward."""
        column_runs(input, (), self._smp_query_heads)
        bias = None if self.bias is None else self._rows(self.bias)
        matrix = self._rows(self._matrix())
        return product(self, for_columns(input), matrix, bias, splits_in=False)

    def _rows(self, whole: Tensor) -> Tensor:
        heads = torch.tensor(self._smp_heads, device=whole.device)
        grouped = whole.reshape(-1, self._smp_unit, *whole.shape[1:])
        return grouped.index_select(0, heads).flatten(0, 1)

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name in ("weight", "bias") and value is not None and reading.is_outside():
            # Code that reads it whole gives a whole gradient, and the ranks' gradients are summed.
            return _CountedOnce.apply(value)
        return value


class PlannedLatent(PlannedPart, nn.Linear):
    """An ``nn.Linear`` held whole; heads read a part of its output directly: ``mla_kv_a_proj``.

    In latent attention the other part is the input of a column, which sums its gradients.

    Attributes:
        _smp_num_direct: number of features, at the end, that heads read directly.
    """

    _smp_num_direct: int

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps ``[*, in]`` to common ``[*, out]``. Collective in backward."""
        y = product(self, input, self._matrix(), self.bias, splits_in=None)
        num = self._smp_num_direct
        latent, direct = y.split([y.shape[-1] - num, num], dim=-1)
        return torch.cat([latent, regions.copy(direct)], dim=-1)


class _CountedOnce(torch.autograd.Function):
    """The identity; divides the gradient by the number of ranks, over which it is summed later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / regions.size()
