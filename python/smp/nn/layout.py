"""Where the activations between two split layers live.

A layout is one number: the dim along which such activations are sharded over the tensor-parallel
ranks, 0 (samples), 1 (sequence) or none (all ranks hold all of them). It follows from the
configuration keys ``prescaled_batch`` and ``optimize``; docs/design/tensor_parallelism.md has the
table. Entering a stack of layers brings activations into the layout, leaving it brings back what
the code around it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from smp.dropout.masks import Slice
from smp.tensor_parallel import regions, sharding
from smp.world import runtime


class Column(Protocol):
    """A linear layer whose output features are split."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    adds_bias: bool


@dataclass(frozen=True)
class Layout:
    """How a distributed module computes, fixed when it is made.

    Attributes:
        dim: along which activations between layers are sharded; None: all ranks hold them.
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
        """The ranks of a group hold different samples outside of the stack."""
        return self.num_ranks > 1 and not self.prescaled

    def sizes(self, extent: int | None) -> list[int] | None:
        """Parts of a sequence of this length; None where regions find them by themselves."""
        if self.dim != 1 or extent is None or extent % self.num_ranks == 0:
            return None
        return sharding.split(extent)

    def extent_inside(self, x: Tensor, mask: Tensor | None) -> int | None:
        """Length of the sequence of which ``x`` is a part, where it matters.

        Args:
            x: in this layout.
            mask: ``[*, S]``; its length tells that of a sequence that is not split evenly.
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
        """The opposite of `enter`; ``extent`` is the length of the sequence if `dim` is 1."""
        if self.has_own_batches:
            return x if self.dim == 0 else regions.scatter(x, 0)
        return regions.gather(x, 1, self.sizes(extent), grad="own") if self.dim == 1 else x

    def all_samples(self, x: Tensor) -> Tensor:
        """``[B, *]`` of every rank, one after the other; without a gradient from other ranks."""
        return regions.gather(x, 0, grad="own") if self.has_own_batches else x

    def expand_to_all(self, x: Tensor, num_samples: int) -> Tensor:
        """`all_samples` of ``[B or 1, *]``; what holds for all samples of a rank is its own."""
        if self.has_own_batches and x.shape[0] != num_samples:
            x = x.expand(num_samples, *x.shape[1:]).contiguous()
        return self.all_samples(x)

    def own_samples(self, x: Tensor) -> Tensor:
        """The part of ``[all B, *]``, equal on all ranks, that the code around the stack holds."""
        return regions.scatter(x, 0) if self.has_own_batches else x

    def all_say(self, says: bool, what: str) -> bool:
        """Is something true of the samples of all ranks that are computed together?

        Collective over ranks with own batches, whose hosts talk.

        Args:
            says: it is true of those of this rank.
            what: words for errors.
        """
        return regions.all_say(says, what) if self.has_own_batches else says

    def whole_mask(
        self, mask: Tensor | None, keys: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """The mask as layers inside a stack take it: of all samples.

        Args:
            mask: additive, ``[B or 1, 1 or heads, 1 or S, S]``, or None for nothing masked.
            keys: ``[B, S, *]`` outside of the stack.
            dtype: of a mask that has to be made; that of the keys if None.
        """
        if mask is None:
            # Layers see from it how long a sequence is that was not cut evenly.
            is_even = self.sizes(keys.shape[1]) is None
            return None if is_even else keys.new_zeros(1, 1, 1, keys.shape[1], dtype=dtype)
        return self.expand_to_all(mask, keys.shape[0])

    # ---- products ----------------------------------------------------------------------

    def columns(self, x: Tensor, layers: Sequence[Column], extent: int | None) -> list[Tensor]:
        """Products of ``x``, in this layout, with layers whose output features are split.

        Args:
            x: ``[B, S, in]``.
            layers: each gives one result, biased if it ``adds_bias``.
            extent: length of the sequence if `dim` is 1.

        Returns:
            ``[all B, all S, own part of out]`` each.
        """
        biases = [layer.bias if layer.adds_bias else None for layer in layers]
        weights: list[Tensor] = [layer.weight for layer in layers]
        return list(regions.gathered_linears(x, weights, biases, self.dim, self.sizes(extent)))

    def sum_up(self, x: Tensor, extent: int | None) -> Tensor:
        """Adds the ranks' terms ``[all B, all S, H]``; the sum is in this layout."""
        if self.dim is None:
            return regions.reduce(x)
        return regions.reduce_scatter(x, self.dim, self.sizes(extent))

    # ---- the rest ----------------------------------------------------------------------

    def slice_of(self, x: Tensor, extent: int | None) -> Slice:
        """Which part of the whole tensor ``[*, S, *]`` of a sample activations in this layout are.

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
        """Activations in this layout are those of all samples that ranks of the group read."""
        return self.has_own_batches and self.dim is None

    def seed(self) -> int:
        """For dropout on activations in this layout: one for all ranks if they hold the same."""
        return regions.common_seed() if self.dim is None else regions.own_seed()

    def mark_whole(self, module: nn.Module) -> None:
        """Says that each rank holds all parameters of a module that works in this layout."""
        for parameter in module.parameters(recurse=False):
            sharding.mark_whole(parameter, partial=self.dim is not None)


def current() -> Layout:
    """The layout that the configuration asks for.

    Raises:
        RuntimeError: before ``smp.init``.
    """
    rank = runtime.current().rank
    config, num_ranks = rank.config, rank.sizes["tp"]
    dim = None
    if config.optimize == "memory" and num_ranks > 1:
        dim = 1 if config.prescaled_batch else 0
    spreads_experts = config.expert_parallel_degree > 1
    return Layout(dim, config.prescaled_batch, config.optimize, num_ranks, spreads_experts)


def uneven(sizes: Sequence[int]) -> list[int] | None:
    """Sizes as regions take them: None if they are equal."""
    return None if len(set(sizes)) == 1 else list(sizes)
