"""Shards of a test grid's ranks are put together with nothing missing and nothing twice."""

from __future__ import annotations

import pytest
import torch

from tests.dist.grid.judging import join_shards
from tests.dist.grid.training import Part, Parts


def shard(begin: int, end: int) -> Parts:
    whole = torch.arange(6.0)
    return {"a": Part(begin, (2, 3), (0, 2, 4, 8), whole[begin:end])}


def test_shards_are_joined_by_their_places() -> None:
    joined, slices = join_shards([shard(4, 6), shard(0, 4)])
    assert torch.equal(joined["a"], torch.arange(6.0).view(2, 3))
    assert slices == {"a": (0, 2, 4, 8)}
    joined, _ = join_shards([shard(0, 6), shard(6, 6), {}])
    assert torch.equal(joined["a"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([shard(0, 3), shard(4, 6)], "elements from 3 on"),
        ([shard(0, 4), shard(3, 6)], "elements from 4 on"),
        ([shard(0, 6), shard(0, 6)], "elements from 6 on"),
        ([shard(0, 5)], "5 of 6 elements"),
    ],
)
def test_gaps_and_overlaps_are_noticed(shards: list[Parts], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        join_shards(shards)
