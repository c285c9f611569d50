"""The layout of activations between two split layers.

A layout is one number: the dim along which such activations are sharded over the tensor-parallel
ranks, 0 (samples), 1 (sequence) or none (all ranks hold all of them). It follows from the
configuration keys ``prescaled_batch`` and ``optimize``; docs/design/tensor_parallelism.md has the
table. Activations come into the layout when they enter a stack of layers. When they leave it, each
rank gets the samples that the code around the stack holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from smp.dropout.masks import Slice
from smp.nn.token_order import TokenOrder
from smp.tensor_parallel import regions, sharding
from smp.tensor_parallel.products import fp8_of
from smp.world import runtime


class Column(Protocol):
    """A linear layer whose output features are split."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    adds_bias: bool


class Row(Protocol):
    """A linear layer whose input features are split."""

    weight: nn.Parameter

    def __call__(self, x: Tensor, other: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Layout:
    """The choices by which a distributed module computes, fixed when it is made.

    Attributes:
        dim: dim along which activations between layers are sharded; None if all ranks hold them.
        prescaled: all ranks of a group hold the same batch outside of the stack.
        optimize: "memory" or "speed".
        num_ranks: the tensor-parallel degree.
        spreads_experts: experts are on different ranks.
    """

    dim: int | None
    prescaled: bool
    optimize: str
    num_ranks: int
    spreads_experts: bool = False

    @property
    def has_own_batches(self) -> bool:
        """Returns whether ranks of a group hold different samples outside of the stack."""
        return self.num_ranks > 1 and not self.prescaled

    def sizes(self, extent: int | None) -> list[int] | None:
        """Returns parts of a sequence of this length, or None where regions need no sizes."""
        if self.dim != 1 or extent is None or extent % self.num_ranks == 0:
            return None
        return sharding.split(extent)

    def extent_inside(self, x: Tensor, mask: Tensor | None) -> int | None:
        """Returns the length of the sequence of which ``x`` is a part, if `dim` is 1.

        Args:
            x: activations in this layout.
            mask: ``[*, S]``; its length is that of the sequence, also if that is split unevenly.
        """
        if self.dim != 1:
            return None
        return x.shape[1] * self.num_ranks if mask is None else mask.shape[-1]

    # ---- borders -----------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """Brings ``[B, S, *]``, as the code around the stack holds it, into this layout."""
        if self.has_own_batches:
            return x if self.dim == 0 else regions.gather(x, 0, grad="own")
        return regions.scatter(x, 1, self.sizes(x.shape[1])) if self.dim == 1 else x

    def leave(self, x: Tensor, extent: int | None) -> Tensor:
        """Reverses `enter`; ``extent`` is the length of the sequence if `dim` is 1."""
        if self.has_own_batches:
            return x if self.dim == 0 else regions.scatter(x, 0)
        return regions.gather(x, 1, self.sizes(extent), grad="own") if self.dim == 1 else x

    def all_samples(self, x: Tensor) -> Tensor:
        """Concatenates ``[B, *]`` of all ranks; gradients of other ranks do not come back."""
        return regions.gather(x, 0, grad="own") if self.has_own_batches else x

    def expand_to_all(self, x: Tensor, num_samples: int) -> Tensor:
        """Expands ``[B or 1, *]`` to this rank's samples and returns `all_samples` of it."""
        if self.has_own_batches and x.shape[0] != num_samples:
            x = x.expand(num_samples, *x.shape[1:]).contiguous()
        return self.all_samples(x)

    def own_samples(self, x: Tensor) -> Tensor:
        """Returns this caller's samples of ``[all B, *]``, which is equal on all ranks."""
        return regions.scatter(x, 0) if self.has_own_batches else x

    def all_say(self, says: bool, what: str) -> bool:
        """Returns whether a statement is true on all ranks whose samples are computed together.

        Collective over ranks with own batches; their hosts exchange messages.

        Args:
            says: whether the statement is true of this rank's samples.
            what: name of the statement, for errors.
        """
        return regions.all_say(says, what) if self.has_own_batches else says

    def whole_mask(
        self, mask: Tensor | None, keys: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Returns the mask of all samples, as layers inside a stack take it.

        Args:
            mask: additive, ``[B or 1, 1 or heads, 1 or S, S]``, or None for nothing masked.
            keys: ``[B, S, *]`` outside of the stack.
            dtype: dtype of a mask that has to be made; that of the keys if None.
        """
        if mask is None:
            # Layers read from it the length of a sequence that is split unevenly.
            is_even = self.sizes(keys.shape[1]) is None
            return None if is_even else keys.new_zeros(1, 1, 1, keys.shape[1], dtype=dtype)
        return self.expand_to_all(mask, keys.shape[0])

    # ---- products ----------------------------------------------------------------------

    def order(self, x: Tensor, extent: int | None) -> TokenOrder | None:
        """Returns the order in which products of ``x`` may have their tokens.

        Args:
            x: activations ``[B, S, *]`` in this layout.
            extent: length of the sequence if `dim` is 1.

        Returns:
            The order, or None where tokens have no order but that of ``[all B, all S]``: nothing is
            gathered, or parts of the sequence differ in size.
        """
        if self.dim is None or self.sizes(extent) is not None:
            return None
        samples, positions = x.shape[:2]
        num_pieces = regions.num_pieces(x, samples if samples > 1 else positions)
        return TokenOrder(self.dim, self.num_ranks, (samples, positions), num_pieces)

    def order_of(self, every: Tensor) -> TokenOrder | None:
        """Returns the order, in one piece, of numbers ``[all B, all S]`` that all ranks have."""
        samples, positions = every.shape
        if self.dim is None or self.sizes(positions) is not None:
            return None
        part = [samples, positions]
        part[self.dim] //= self.num_ranks
        return TokenOrder(self.dim, self.num_ranks, (part[0], part[1]))

    def columns(
        self,
        x: Tensor,
        layers: Sequence[Column],
        extent: int | None,
        order: TokenOrder | None = None,
    ) -> list[Tensor]:
        """Returns products of ``x``, in this layout, with layers whose output features are split.

        Args:
            x: ``[B, S, in]``.
            layers: layers, each for one result, biased if it ``adds_bias``.
            extent: length of the sequence if `dim` is 1.
            order: order of the results' tokens, from `order`; None for that of the samples.

        Returns:
            ``[all B, all S, own part of out]`` each, or blocks of the order.
        """
        biases = [layer.bias if layer.adds_bias else None for layer in layers]
        weights: list[Tensor] = [layer.weight for layer in layers]
        parts, dim, sizes = x, self.dim, self.sizes(extent)
        if order is not None:
            parts, dim, sizes = order.parts(x), 1, None
        results: dict[int, Tensor] = {}
        scalings = [fp8_of(layer) for layer in layers]
        for fp8 in dict.fromkeys(scalings):  # one gather, unless some operands have 8 bits
            idxs = [idx for idx, scaling in enumerate(scalings) if scaling == fp8]
            products = regions.gathered_linears(
                parts,
                [weights[idx] for idx in idxs],
                [biases[idx] for idx in idxs],
                dim,
                sizes,
                fp8,
            )
            results.update(zip(idxs, products, strict=True))
        return [results[idx] for idx in range(len(layers))]

    def rows(
        self,
        x: Tensor,
        layer: Row,
        extent: int | None,
        order: TokenOrder | None,
        other: Tensor | None = None,
    ) -> Tensor:
        """Returns the product of ``x`` with a layer whose input features are split, in this layout.

        The ranks' terms are summed, and the bias is not added.

        Args:
            x: ``[all B, all S, own part of in]``, or blocks of the order.
            layer: layer that computes this rank's term.
            extent: length of the sequence if `dim` is 1.
            order: order of the tokens in ``x``; None for that of the samples.
            other: second term of this rank, in the order of ``x``.
        """
        if order is not None and order.num_pieces > 1 and fp8_of(layer) is None:
            return order.own(regions.summed_linear(x, layer.weight, other))
        return self.sum_up(layer(x, other), extent, order)

    def gathered(self, x: Tensor, order: TokenOrder | None, extent: int | None) -> Tensor:
        """Returns ``[all B, all S, H]`` of ``x``, in this layout, for products with split layers.

        Gradients of the ranks are summed, as by `columns`, which keeps less for backward.

        Args:
            x: ``[B, S, H]``.
            order: order of the result's tokens, which is then of blocks.
            extent: length of the sequence if `dim` is 1.
        """
        if self.dim is None:
            return regions.copy(x)
        if order is not None:
            return regions.gather(order.parts(x), 1, grad="sum")
        return regions.gather(x, self.dim, self.sizes(extent), grad="sum")

    def sum_up(self, x: Tensor, extent: int | None, order: TokenOrder | None = None) -> Tensor:
        """Adds the ranks' terms ``[all B, all S, H]``, or blocks; the sum is in this layout."""
        if self.dim is None:
            return regions.reduce(x)
        if order is not None:
            return order.own(regions.reduce_scatter(x, 1))
        return regions.reduce_scatter(x, self.dim, self.sizes(extent))

    # ---- the rest ----------------------------------------------------------------------

    def slice_of(self, x: Tensor, extent: int | None) -> Slice:
        """Returns the place of activations in this layout in a sample's whole tensor ``[*, S, *]``.

        Args:
            x: activations.
            extent: length of the sequence where `sizes` needs it.
        """
        if self.dim != 1:
            return Slice(1, 0, x.shape[1])
        sizes = self.sizes(extent)
        if sizes is None:
            return Slice(1, regions.rank() * x.shape[1], self.num_ranks * x.shape[1])
        return Slice(1, sharding.begin_of(sizes), sum(sizes))

    @property
    def holds_group(self) -> bool:
        """Returns whether activations in this layout are of all samples that the group reads."""
        return self.has_own_batches and self.dim is None

    def seed(self) -> int:
        """Returns a seed for dropout, the same on ranks that hold the same activations."""
        return regions.common_seed() if self.dim is None else regions.own_seed()

    def mark_whole(self, module: nn.Module) -> None:
        """Marks all parameters of a module in this layout as held whole by each rank."""
        for parameter in module.parameters(recurse=False):
            sharding.mark_whole(parameter, partial=self.dim is not None)


def current() -> Layout:
    """Returns the layout that the configuration asks for.

    Raises:
        RuntimeError: ``smp.init`` was not called.
    """
    rank = runtime.current().rank
    config, num_ranks = rank.config, rank.sizes["tp"]
    dim = None
    if config.optimize == "memory" and num_ranks > 1:
        dim = 1 if config.prescaled_batch else 0
    spreads_experts = config.expert_parallel_degree > 1
    return Layout(dim, config.prescaled_batch, config.optimize, num_ranks, spreads_experts)


def uneven(sizes: Sequence[int]) -> list[int] | None:
    """Returns sizes as regions take them: None if they are equal."""
    return None if len(set(sizes)) == 1 else list(sizes)
