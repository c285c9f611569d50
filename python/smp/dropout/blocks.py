"""Tracks blocks that a plan splits: their columns and rows report each run (see `parts`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from smp.dropout import places
from smp.dropout.parts import Block, Share
from smp.tensor_parallel import regions


@contextlib.contextmanager
def entered(of_group: bool) -> Iterator[None]:
    """Sets the current block for one call of it.

    Args:
        of_group: whether tensors inside have the samples of all ranks of the tensor-parallel group.
    """
    place = places.current()
    if place is None:
        yield
        return
    before = place.block, place.of_group
    place.block, place.of_group = Block(), of_group or place.of_group
    try:
        yield
    finally:
        place.block, place.of_group = before


def column_runs(x: Tensor, sizes: Sequence[int], heads: Share | None) -> None:
    """Notes that a column of the running block reads ``x``.

    Args:
        x: common activations.
        sizes: sizes of the parts of its output, by rank; empty if several ranks have one head.
        heads: share of query heads that this rank has, if it is a column of attention.
    """
    place = places.current()
    if place is None or place.block is None:
        return
    block = place.block
    block.is_split, block.width, block.heads = True, x.shape[-1], heads
    if sizes:
        share = Share.of(sizes, regions.rank())
        block.columns[share.own] = share


def row_runs() -> None:
    """Notes that a row of the running block has summed the parts."""
    place = places.current()
    if place is not None and place.block is not None:
        place.block.is_split = False
