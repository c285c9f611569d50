"""The order of gathered tokens: blocks of pieces and ranks, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from smp.nn.token_order import TokenOrder

# (samples, positions) of a rank's part, and the number of pieces
PARTS = [((4, 3), 1), ((4, 3), 2), ((4, 3), 4), ((1, 6), 1), ((1, 6), 3), ((1, 1), 1)]


def gathered(order: TokenOrder, every: Tensor) -> Tensor:
    """Returns what a gather of all ranks' pieces gives: `[c, t, b, s, *]`."""
    parts = every.chunk(order.num_ranks, order.dim)
    return torch.cat([order.parts(part) for part in parts], 1)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("part", "num_pieces"), PARTS)
def test_blocks_are_what_a_gather_gives_and_can_be_sorted(
    num_ranks: int, dim: int, part: tuple[int, int], num_pieces: int
) -> None:
    order = TokenOrder(dim, num_ranks, part, num_pieces)
    shape = list(part)
    shape[dim] *= num_ranks
    every = torch.arange(2 * shape[0] * shape[1]).view(*shape, 2)
    blocks = gathered(order, every)
    assert blocks.shape[:2] == (num_pieces, num_ranks)
    assert torch.equal(order.sorted(blocks), every)
    assert torch.equal(order.blocks(every), blocks)
    assert order.blocks(every).is_contiguous()
    own = every.chunk(num_ranks, dim)[0].contiguous()
    assert order.parts(own).data_ptr() == own.data_ptr()
    assert torch.equal(order.own(order.parts(own)), own)


@pytest.mark.parametrize(
    ("dim", "part", "is_sorted"),
    [(0, (4, 3), True), (1, (1, 6), True), (1, (4, 3), False)],
    ids=["samples", "one sequence", "sequences"],
)
def test_only_parts_of_several_sequences_are_copied(
    dim: int, part: tuple[int, int], is_sorted: bool
) -> None:
    blocks = torch.randn(1, 2, *part, 5)
    result = TokenOrder(dim, 2, part).sorted(blocks)
    assert (result.data_ptr() == blocks.data_ptr()) == is_sorted
