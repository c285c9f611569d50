"""Shares the seed, the step and the ranks' samples among all draws of a rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

import smp._C as _C
from smp.dropout.batches import BatchTable, Samples
from smp.dropout.masks import mixed
from smp.dropout.operators import Operators
from smp.dropout.places import Place, refusing
from smp.world.rank import Rank
from smp.world.steps import Steps

_WORD = 2**64 - 1
OUTSIDE = refusing(
    "the model is called outside of a step function, so that its samples are not known",
    "call it in a function decorated with @smp.step",
)


class Draws:
    """Masks of one rank that no layout changes; shared by all models, until `close`.

    Args:
        rank: rank of this process.
        steps: steps of the rank; they keep the seed, which checkpoints save.
    """

    def __init__(self, rank: Rank, steps: Steps) -> None:
        self._rank, self._steps = rank, steps
        self._operators = Operators(lambda: steps.running is not None)
        self._table: BatchTable | None = None
        self._parts: Sequence[int] = (0,)
        self._own = 0
        self._dim: int | None = 0
        self._why_not = ""

    def begin_step(
        self, parts: Sequence[tuple[int, int]], dim: int | None, *, trains: bool
    ) -> None:
        """Begins a step. Collective over all ranks if it trains.

        Args:
            parts: number of samples and of microbatches of each part that this process reads: one,
                or one for each data-parallel rank that it reads for.
            dim: dim along which the arguments have samples; None: they differ in it.
            trains: whether gradients are enabled.
        """
        self._dim, self._why_not = dim, ""
        if not trains:
            self._table = BatchTable(0, ())
            self._why_not = (
                "gradients are disabled, so that the ranks do not tell each other which samples "
                "they have; call the model with gradients, or in evaluation mode"
            )
            return
        rank, steps = self._rank, self._steps
        own_part = rank.ranks["dp"]
        if rank.config.prescaled_batch and rank.sizes["tp"] > 1:
            own_part = rank.ranks["rdp"]
        seed = steps.dropout_seed
        if seed is None:
            seed = torch.initial_seed() & _WORD
        own = [rank.ranks["pp"], own_part, seed, steps.num_begun, list(parts)]
        told: list[Any] = [own]
        if rank.exchange is not None:
            sent = json.dumps(own).encode()
            told = [json.loads(p) for p in rank.exchange.all_gather(rank.groups["world"], sent)]
        seed, step = told[0][2:4]  # scripts may seed each rank differently
        steps.dropout_seed = seed
        by_part = {part: sizes for pp, part, _, _, sizes in reversed(told) if pp == 0}
        sizes = [tuple(size) for _, found in sorted(by_part.items()) for size in found]
        self._table = BatchTable(mixed(seed, step), tuple((size, num) for size, num in sizes))
        peers = rank.groups["tp"]
        self._parts = [told[peer][1] if len(told) > 1 else own_part for peer in peers]
        self._own = peers.index(rank.global_rank)
        if any(size == 0 for size, _ in sizes):
            self._why_not = (
                "the step function has no argument with samples on some rank, so that they cannot "
                "be counted; give the batch to the step function as an argument"
            )

    @property
    def is_open(self) -> bool:
        """Returns whether a step runs."""
        return self._table is not None

    def samples(self, mb: int, part: int | None = None) -> Samples:
        """Returns the samples of a microbatch.

        Args:
            mb: number of the microbatch.
            part: part of the batch, if this process reads for several data-parallel ranks.
        """
        if self._table is None:
            raise RuntimeError(
                f"{_C.rank_prefix()}samples of a microbatch were asked for by no step"
            )
        parts, own = (self._parts, self._own) if part is None else ([part], 0)
        return Samples(self._table, parts, own, mb, self._why_not)

    def body(self, mb: int, part: int | None = None) -> Place:
        """Returns the place where a step function begins.

        Args:
            mb, part: see `samples`.
        """
        return Place(0, self.samples(mb, part), dim=self._dim)

    def end_step(self) -> None:
        """Ends the step. May be called twice."""
        self._table = None

    def close(self) -> None:
        """Restores PyTorch's dropout. May be called twice."""
        self._operators.close()
