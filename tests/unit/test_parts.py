"""Parts of tensors: what is cut out comes together again, whichever rank holds which elements."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from smp.tensor_parallel import partial, sharding
from smp.tensor_parallel.cutting import cut, join, part_of
from smp.tensor_parallel.parts import Part


def parts_of(shape: tuple[int, ...], dim: int, sizes: list[int], num_flat: int) -> list[Part]:
    """Slices along a dim (-1: of all elements), each cut into pieces of about equal numel."""
    extent = sum(sizes)
    parts, begin = [], 0
    for size in sizes:
        numel = torch.Size(shape).numel() // max(extent, 1) * size
        step = -(-numel // num_flat)
        for i in range(num_flat):
            first = min(numel, i * step)
            part = Part(dim, begin, begin + size, extent, first, min(numel, first + step) - first)
            part.check(shape)
            parts.append(part)
        begin += size
    return parts


@pytest.mark.parametrize("num_flat", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("shape", "dim", "sizes"),
    [
        ((6, 4), 0, [2, 4]),
        ((6, 4), 1, [1, 3]),
        ((2, 3, 4), 1, [1, 1, 1]),
        ((2, 3, 4), 2, [4, 0]),
        ((6, 4), -1, [24]),
        ((6, 4), -1, [11, 13]),
        ((), -1, [1]),
        ((0, 3), -1, [0]),
    ],
)
def test_parts_come_together(
    shape: tuple[int, ...], dim: int, sizes: list[int], num_flat: int
) -> None:
    whole = torch.rand(shape)
    pieces = [(cut(whole, part), part) for part in parts_of(shape, dim, sizes, num_flat)]
    random.Random(3).shuffle(pieces)
    back = join(pieces + pieces, shape)  # of several copies the first counts
    assert torch.equal(back, whole)
    assert not back.numel() or back.data_ptr() != whole.data_ptr()


@pytest.mark.parametrize("num_parts", [1, 2, 5, 24, 30])
def test_equal_shares_come_together(num_parts: int) -> None:
    whole = torch.rand(6, 4)
    parts = [Part.share(whole.shape, idx, num_parts) for idx in range(num_parts)]
    assert torch.equal(join([(cut(whole, part), part) for part in parts], (6, 4)), whole)
    assert {part.flat_numel for part in parts[: 24 // -(-24 // num_parts)]} == {-(-24 // num_parts)}


def test_other_sizes_group_rows() -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = [Part(1, begin, begin + 1, 2, 0, 12, (3, 2, 4)) for begin in range(2)]
    pieces = [(cut(whole, part), part) for part in parts]
    assert pieces[0][0].view(3, 4).tolist() == whole[[0, 2, 4]].tolist()
    assert torch.equal(join(pieces, whole.shape), whole)


@pytest.mark.parametrize("lost", range(6))
def test_a_missing_part_is_said(lost: int) -> None:
    whole = torch.rand(6, 4)
    parts = parts_of((6, 4), 0, [3, 3], 3)
    del parts[lost]
    with pytest.raises(ValueError, match="without a gap"):
        join([(cut(whole, part), part) for part in parts], (6, 4))
    with pytest.raises(ValueError, match=r"dim 0 of size 6, but only \[3, 6\) are there"):
        join([(cut(whole, part), part) for part in parts_of((6, 4), 0, [3, 3], 1)[1:]], (6, 4))


def entry_of(whole: Tensor, rank: int, shard: int) -> dict[str, Tensor]:
    """An optimizer's entry of one of two slices, and of one of two halves of that."""
    part = Part(0, 3 * rank, 3 * rank + 3, 6, 6 * shard, 6)
    return {"exp_avg": cut(whole, part).clone(), "step": torch.tensor(7.0)}


def test_entries_that_are_cut_twice_become_whole_at_once() -> None:
    whole = torch.rand(6, 4)
    states = [
        {
            0: entry_of(whole, rank, shard),
            partial.SHARDS_MARK: {0: (0, 3 * rank, 3 * rank + 3, 6)},
            partial.FLAT_MARK: {0: (6 * shard, 6, (3, 4))},
        }
        for rank in range(2)
        for shard in range(2)
    ]
    merged = partial.merge(states)
    assert list(merged) == [0] and merged[0]["step"] == 7
    assert torch.equal(merged[0]["exp_avg"], whole)
    for i in range(4):
        with pytest.raises(ValueError, match="'0' .*; give the parts of all"):
            partial.merge(states[:i] + states[i + 1 :])


def test_who_holds_nothing_says_nothing() -> None:
    """Merges the state of a rank without elements, which may count from another offset.

    The state may also lack entries that the other ranks have.
    """
    nothing = {0: {}, partial.FLAT_MARK: {0: (4, 0, (4,))}}
    full = {0: {"m": torch.arange(4.0)}, partial.FLAT_MARK: {0: (0, 4, (4,))}}
    assert partial.merge([nothing, full])[0]["m"].tolist() == [0, 1, 2, 3]


# ---- packed matrices


def packed_parts(whole: Tensor, dim: int, num: int, sizes: list[int]) -> list[nn.Parameter]:
    """The parts of the ranks, marked."""
    apart = whole.unflatten(dim, (num, -1)).split(sizes, dim + 1)
    made = [nn.Parameter(piece.flatten(dim, dim + 1).contiguous()) for piece in apart]
    for rank, part in enumerate(made):
        sharding.mark_packed(part, dim, num, sum(sizes[:rank]), sum(sizes))
    return made


PACKED = [((2, 10, 3), 1, [3, 2]), ((2, 3, 8), 2, [1, 2, 1]), ((12,), 0, [2, 4]), ((6, 5), 0, [3])]


@pytest.mark.parametrize(("shape", "dim", "sizes"), PACKED)
def test_packed_parts_are_slices_of_the_whole(
    shape: tuple[int, ...], dim: int, sizes: list[int]
) -> None:
    whole = torch.randn(shape)
    for part in packed_parts(whole, dim, 2, sizes):
        assert sharding.whole_shape(part) == list(shape)
        assert torch.equal(sharding.slice_of(whole, sharding.interval_of(part)), part)
        found = part_of(part)
        found.check(shape)
        assert torch.equal(cut(whole, found), part.detach().flatten())
        counted = sharding.interval_of(part)
        assert isinstance(counted, sharding.PackedInterval)
        assert counted.counted().size == part.shape[dim]
        assert counted.counted().extent == shape[dim]


@pytest.mark.parametrize("num_flat", [1, 3])
@pytest.mark.parametrize(("shape", "dim", "sizes"), PACKED)
def test_marked_packed_states_become_whole(
    shape: tuple[int, ...], dim: int, sizes: list[int], num_flat: int
) -> None:
    whole = torch.randn(shape)
    states = []
    for part in packed_parts(whole, dim, 2, sizes):
        slices = partial.slices_of([("a", part)])
        step = -(-part.numel() // num_flat)
        for begin in range(0, part.numel(), step):
            piece = part.detach().flatten()[begin : begin + step]
            flat = None if num_flat == 1 else {"a": (begin, piece.numel(), tuple(part.shape))}
            value = part.detach() if num_flat == 1 else piece
            states.append({"a": value, **partial.marks_of(slices, flat)})
    assert torch.equal(partial.merge(states)["a"], whole)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_tensor_of_one_rank_is_whole_with_the_empty_slices_of_others(owner: int) -> None:
    whole = torch.arange(12.0).view(4, 3)
    states = []
    for rank in range(3):
        begin, end = (0 if rank <= owner else 4), (4 if rank >= owner else 0)
        slices = {"weight": (0, begin, end, 4)}
        states.append({"weight": whole[begin:end], partial.SHARDS_MARK: slices})
    merged = partial.merge(states)
    assert torch.equal(merged["weight"], whole)
