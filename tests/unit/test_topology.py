"""The process grid through its binding: golden placements and properties."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp import _C

# Eight processes, pp 2, tp 2, rdp 2: rows rdp, pp, tp, dp, mp over global ranks 0..7.
GOLDEN_RANKS = {
    "DPT": ["00001111", "00110011", "01010101", "01012323", "01230123"],
    "DTP": ["00001111", "01010101", "00110011", "00112233", "01230123"],
    "PDT": ["00110011", "00001111", "01010101", "01230123", "01012323"],
    "PTD": ["01010101", "00001111", "00110011", "01230123", "00112233"],
    "TDP": ["00110011", "01010101", "00001111", "00112233", "01012323"],
    "TPD": ["01010101", "00110011", "00001111", "01012323", "00112233"],
}
# TP, PP, RDP, DP and MP groups.
GOLDEN_GROUPS = {
    "DPT": ["01 23 45 67", "02 13 46 57", "04 15 26 37", "0145 2367", "0123 4567"],
    "DTP": ["02 13 46 57", "01 23 45 67", "04 15 26 37", "0246 1357", "0123 4567"],
    "PDT": ["01 23 45 67", "04 15 26 37", "02 13 46 57", "0123 4567", "0145 2367"],
    "PTD": ["02 13 46 57", "04 15 26 37", "01 23 45 67", "0123 4567", "0246 1357"],
    "TDP": ["04 15 26 37", "01 23 45 67", "02 13 46 57", "0246 1357", "0145 2367"],
    "TPD": ["04 15 26 37", "02 13 46 57", "01 23 45 67", "0145 2367", "0246 1357"],
}
NAMES = {"cluster": "DPT", "spread": "TPD"}
KINDS = ("world", "mp", "dp", "pp", "tp", "rdp")


def digits(text: str) -> list[list[int]]:
    return [[int(c) for c in word] for word in text.split()]


@pytest.mark.parametrize("strategy", [*GOLDEN_RANKS, *NAMES])
def test_ranks_of_all_permutations_equal_the_documentation(strategy: str) -> None:
    grid = _C.ProcessGrid(8, 2, 2, 1, strategy)
    for kind, row in zip(
        ("rdp", "pp", "tp", "dp", "mp"), GOLDEN_RANKS[NAMES.get(strategy, strategy)], strict=True
    ):
        assert [grid.group_rank(kind, rank) for rank in range(8)] == digits(row)[0], kind


@pytest.mark.parametrize("strategy", [*GOLDEN_GROUPS, *NAMES])
def test_groups_of_all_permutations_equal_the_documentation(strategy: str) -> None:
    grid = _C.ProcessGrid(8, 2, 2, 1, strategy)
    for kind, row in zip(
        ("tp", "pp", "rdp", "dp", "mp"), GOLDEN_GROUPS[NAMES.get(strategy, strategy)], strict=True
    ):
        assert grid.groups(kind) == digits(row), kind


@pytest.mark.parametrize(
    ("strategy", "mp_groups", "dp_groups", "mp_ranks", "dp_ranks"),
    [
        ("cluster", "01 23 45 67", "0246 1357", "01010101", "00112233"),
        ("spread", "04 15 26 37", "0123 4567", "00001111", "01230123"),
    ],
)
def test_documented_example_without_tensor_parallelism(
    strategy: str, mp_groups: str, dp_groups: str, mp_ranks: str, dp_ranks: str
) -> None:
    grid = _C.ProcessGrid(8, 2, 1, 1, strategy)
    assert grid.groups("mp") == grid.groups("pp") == digits(mp_groups)
    assert grid.groups("dp") == grid.groups("rdp") == digits(dp_groups)
    assert [grid.group_rank("mp", r) for r in range(8)] == digits(mp_ranks)[0]
    assert [grid.group_rank("dp", r) for r in range(8)] == digits(dp_ranks)[0]


LAYOUTS = [
    (world, pp, tp)
    for world in range(1, 17)
    for pp in range(1, world + 1)
    for tp in range(1, world + 1)
    if world % (pp * tp) == 0
]


@given(st.sampled_from(LAYOUTS), st.sampled_from([*GOLDEN_RANKS, *NAMES]))
def test_every_factoring_keeps_the_documented_identities(
    layout: tuple[int, int, int], strategy: str
) -> None:
    world, pp, tp = layout
    grid = _C.ProcessGrid(world, pp, tp, 1, strategy)
    size = {kind: grid.group_size(kind) for kind in KINDS}
    assert size["mp"] * size["rdp"] == world
    assert size["pp"] * size["dp"] == world
    assert size["pp"] * size["tp"] * size["rdp"] == world
    assert size["dp"] == size["rdp"] * size["tp"]
    assert size["mp"] == size["pp"] * size["tp"]
    for kind in KINDS:
        groups = grid.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(group == sorted(group) and len(group) == size[kind] for group in groups)
    for rank in range(world):
        place = grid.coordinates(rank)
        assert grid.global_rank(place) == rank
        own = {kind: set(grid.group(kind, rank)) for kind in KINDS}
        assert own["tp"] == own["mp"] & own["dp"]
        assert own["mp"] == {r for peer in own["tp"] for r in grid.group("pp", peer)}
        assert own["dp"] == {r for peer in own["tp"] for r in grid.group("rdp", peer)}
        assert grid.group_rank("pp", rank) == place.pp
        assert grid.group_rank("tp", rank) == place.tp
        assert grid.group_rank("rdp", rank) == place.rdp
    if tp == 1:
        assert grid.groups("mp") == grid.groups("pp")
        assert grid.groups("dp") == grid.groups("rdp")
    if pp == 1:
        assert grid.groups("tp") == grid.groups("mp")


CONTEXT_LAYOUTS = [
    (world, pp, tp, cp)
    for world, pp, tp in LAYOUTS
    for cp in range(1, world + 1)
    if world % (pp * tp * cp) == 0
]


@given(st.sampled_from(CONTEXT_LAYOUTS), st.sampled_from([*GOLDEN_RANKS, "CDPT", "PCTD"]))
def test_ranks_of_one_batch_are_replicas_with_the_same_place_among_batches(
    layout: tuple[int, int, int, int], strategy: str
) -> None:
    world, pp, tp, cp = layout
    grid = _C.ProcessGrid(world, pp, tp, cp, strategy)
    kinds = (*KINDS, "cp", "dp_cp", "rdp_cp", "tp_cp")
    size = {kind: grid.group_size(kind) for kind in kinds}
    assert size["mp"] * size["rdp_cp"] == size["pp"] * size["dp_cp"] == world
    assert (size["cp"], size["dp_cp"], size["tp_cp"]) == (cp, cp * size["dp"], cp * tp)
    for rank in range(world):
        place = grid.coordinates(rank)
        assert grid.global_rank(place) == rank and grid.group_rank("cp", rank) == place.cp
        own = {kind: set(grid.group(kind, rank)) for kind in kinds}
        assert own["cp"] == own["rdp_cp"] & own["tp_cp"]
        assert own["dp_cp"] == {r for peer in own["cp"] for r in grid.group("dp", peer)}
        for peer in own["cp"]:
            for kind in ("dp", "rdp", "pp", "tp", "mp"):
                assert grid.group_rank(kind, peer) == grid.group_rank(kind, rank)
        words = f" cp {place.cp} " if cp > 1 else f"tp {place.tp} rdp"
        assert words in grid.describe(rank)


def test_right_most_letter_varies_fastest() -> None:
    for strategy in GOLDEN_RANKS:
        grid = _C.ProcessGrid(30, 2, 3, 1, strategy)  # rdp 5
        first, second = grid.coordinates(0), grid.coordinates(1)
        changed = {"P": first.pp != second.pp, "T": first.tp != second.tp}
        changed["D"] = first.rdp != second.rdp
        assert [letter for letter, differs in changed.items() if differs] == [strategy[-1]]


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        _C.ProcessGrid(8, 3, 1, 1, "cluster")
    with pytest.raises(ValueError, match="placement_strategy"):
        _C.ProcessGrid(8, 2, 1, 1, "DDT")
    with pytest.raises(ValueError, match="outside"):
        _C.ProcessGrid(8, 2, 1, 1, "cluster").coordinates(8)


def test_shard_intervals_compare_and_travel() -> None:
    shard = _C.ShardInterval.even(12, 3, 1, dim=1)
    assert (shard.dim, shard.begin, shard.end, shard.extent, shard.size) == (1, 4, 8, 12, 4)
    assert shard.shape([5, 12]) == [5, 4]
    assert pickle.loads(pickle.dumps(shard)) == shard
    assert len({shard, _C.ShardInterval.even(12, 3, 1, dim=1)}) == 1
    assert repr(shard) == "dim 1 [4, 8) of 12"
    assert shard != _C.ShardInterval.even(12, 3, 2, dim=1)
