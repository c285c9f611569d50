"""Linear layers split over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smp.nn import layout as layouts
from smp.nn.layout import Layout, uneven
from smp.nn.module import ReadAsWhole
from smp.nn.parameters import add_split, fill_linear, split_or_refuse
from smp.tensor_parallel import reading, regions, sharding
from smp.tensor_parallel.products import fp8_of, product


class ColumnLinear(nn.Module):
    """A part of a linear layer, for some of its output features.

    Several such layers read one gathered input, see `Layout.columns`.

    Args:
        in_features: input features of the layer.
        sizes: numbers of output features, by rank.
        bias: the layer has a bias.
        std: standard deviation of the initial weight; None for the weight of ``nn.Linear``.
        adds_bias: False if the code that reads the product adds the bias.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        bias: bool,
        std: float | None,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.adds_bias = adds_bias
        self.sizes = list(sizes)
        self.in_features, self.out_features = in_features, sum(sizes)
        self._std = std
        add_split(self, "weight", [self.out_features, in_features], 0, sizes)
        if bias:
            add_split(self, "bias", [self.out_features], 0, sizes)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises this rank's part."""
        fill_linear(self.weight, self.bias, self.in_features, self._std)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the own part ``[*, out]`` of the product of a gathered input ``[*, in]``."""
        bias = self.bias if self.adds_bias else None
        return product(self, x, self.weight, bias, splits_in=False)

    def extra_repr(self) -> str:
        return _describe(self)


class RowLinear(nn.Module):
    """A part of a linear layer, for some of its input features.

    Args:
        sizes: numbers of input features, by rank.
        out_features: output features of the layer.
        bias: the layer has a bias, held whole, which the caller adds to the sum of all terms.
        std: standard deviation of the initial weight; None for the weight of ``nn.Linear``.
        layout: layout of the sum.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, sizes: Sequence[int], out_features: int, bias: bool, std: float | None, layout: Layout
    ) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.in_features, self.out_features = sum(sizes), out_features
        self._std = std
        add_split(self, "weight", [out_features, self.in_features], 1, sizes)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features))
            sharding.mark_whole(self.bias, partial=layout.dim is not None)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises this rank's part."""
        fill_linear(self.weight, self.bias, self.in_features, self._std)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Returns this rank's term ``[*, out]`` of the product, from its part ``[*, in]`` of input.

        The term is neither summed over ranks nor biased.

        Args:
            x: own part of the input.
            other: tensor ``[*, out]`` that is added; the product adds up onto it.
        """
        if other is None or fp8_of(self) is not None:
            term = product(self, x, self.weight, None, splits_in=True)
            return term if other is None else term + other
        total = torch.addmm(other.flatten(0, -2), x.flatten(0, -2), self.weight.t())
        return total.view(other.shape)

    def extra_repr(self) -> str:
        return _describe(self)


class DistributedLinear(ReadAsWhole):
    """An ``nn.Linear``, split over its input features.

    Each rank holds ``weight[:, own part]``. With own batches each rank gets its features of all
    samples, and sums are returned to the ranks of the samples; with ``prescaled_batch`` every rank
    takes its features and the terms are summed. All ranks of a tensor-parallel group call it
    together, with inputs of one shape.

    Args:
        in_features: input features of the whole layer, at least the tensor-parallel degree.
        out_features: output features of the layer.
        bias: the layer has a bias, which every rank holds.
        initializer_range: standard deviation of the initial weight; None for ``nn.Linear``'s.

    Raises:
        Unsupported: a rank would get no features.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        initializer_range: float | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._std = initializer_range
        self._layout = layouts.current()
        self._sizes = split_or_refuse(in_features, "in_features")
        add_split(self, "weight", [out_features, in_features], 1, self._sizes)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features))
            sharding.mark_whole(self.bias, partial=self._layout.has_own_batches)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises this rank's part."""
        fill_linear(self.weight, self.bias, self.in_features, self._std)

    @reading.own_code
    def forward(self, input: Tensor) -> Tensor:
        """Maps ``[*, in_features]`` to ``[*, out_features]``. Collective over the group."""
        x = input if input.dim() > 1 else input[None]
        sizes = uneven(self._sizes)
        if self._layout.has_own_batches:
            x = regions.exchange(x, x.dim() - 1, 0, split_sizes=sizes)
            y = regions.reduce_scatter(self._product(x), 0)
        else:
            x = regions.scatter(x, x.dim() - 1, sizes)
            y = regions.reduce(self._product(x))
        if self.bias is not None:
            y = y + self.bias
        elif y._is_view():  # a view made by an autograd node cannot be written in place
            y = y.clone()
        return y if input.dim() > 1 else y[0]

    def _product(self, x: Tensor) -> Tensor:
        return product(self, x, self._matrix(), None, splits_in=True)

    def _matrix(self) -> Tensor:
        """Returns ``[out_features, own part of in_features]``."""
        return self.weight

    def extra_repr(self) -> str:
        return _describe(self)


def _describe(module: ColumnLinear | RowLinear | DistributedLinear) -> str:
    return (
        f"in_features={module.in_features}, out_features={module.out_features}, "
        f"bias={module.bias is not None}, local weight {list(module.weight.shape)}"
    )
