"""Ranks go on between two steps after a failure, with what each other has gathered there."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from smp.world.between_steps import BetweenSteps, Notes, known_to


@dataclass
class Lost(RuntimeError):
    rank: int


@dataclass
class SimulatedRank:
    """The attributes of a `Rank` that are used, in a world of two groups of each rank."""

    global_rank: int
    groups: dict[str, tuple[int, ...]]
    is_apart: bool = False
    gathers_later: bool = False
    board: Any = None
    prefix: str = ""
    done: list[Tensor] = field(default_factory=list)


def groups_of(rank: int) -> dict[str, tuple[int, ...]]:
    return {"shard": (rank // 2 * 2, rank // 2 * 2 + 1), "mp": (rank % 2, rank % 2 + 2)}


def notes_of(rank: int, num_shard: int, num_mp: int, **others: Any) -> Notes:
    groups = groups_of(rank)
    gathered = [(groups["shard"], torch.tensor([i])) for i in range(num_shard)]
    gathered += [(groups["mp"], torch.tensor([10 + i])) for i in range(num_mp)]
    return Notes(gathered, **others)


def test_a_number_that_one_rank_of_a_group_has_is_known() -> None:
    noted = [
        notes_of(0, 3, 1),
        None,
        notes_of(2, 1, 2, is_over=True),
        notes_of(3, 1, 0, num_calls=2),
    ]
    known = known_to(1, noted)
    assert known.numbers == {(0, 1): [0, 1, 2]}, "nobody but rank 3 is in its other group"
    assert known.over == {2} and not known.are_all_over and known.num_calls == 2
    assert known_to(0, noted).numbers == {(0, 1): [0, 1, 2], (0, 2): [10, 11]}


def never(error: RuntimeError) -> None:
    raise error


def test_a_rank_reads_what_others_know_and_gathers_the_rest() -> None:
    rank: Any = SimulatedRank(0, groups_of(0))
    noted = [None, notes_of(1, 2, 0), Notes(), Notes()]

    def go_on(error: RuntimeError) -> None:
        assert isinstance(error, Lost)
        between.resume(rank, known_to(0, [between.notes, *noted[1:]]))

    def fail() -> Tensor:
        raise Lost(1)

    between = BetweenSteps(go_on)
    assert between.gather(rank, "shard", lambda: torch.tensor([0])) == 0
    assert between.gather(rank, "shard", fail) == 1, "rank 1 had it"
    assert rank.gathers_later and not rank.is_apart
    assert between.gather(rank, "shard", lambda: torch.tensor([2])) == 2
    assert between.gather(rank, "mp", lambda: torch.tensor([10])) == 10
    assert [int(found) for _, found in between.notes.gathered] == [0, 1, 2, 10]
    between.end(rank)
    assert between.notes.is_over


@pytest.mark.parametrize("asks", [1, 3])
def test_other_counts_of_numbers_are_refused(asks: int) -> None:
    rank: Any = SimulatedRank(0, groups_of(0))
    between = BetweenSteps(never)
    between.resume(rank, known_to(0, [None, notes_of(1, 2, 0, is_over=True)]))
    with pytest.raises(RuntimeError, match="have computed other norms there"):
        for _ in range(asks):
            between.gather(rank, "shard", lambda: torch.tensor([5]))
        between.end(rank)


def test_an_error_that_is_no_failure_of_another_rank_is_raised() -> None:
    rank: Any = SimulatedRank(0, groups_of(0))

    def fail() -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        BetweenSteps(never).gather(rank, "shard", fail)


@pytest.mark.parametrize("is_over", [False, True])
def test_calls_that_others_have_made_are_left_out(is_over: bool) -> None:
    rank: Any = SimulatedRank(0, groups_of(0))
    between = BetweenSteps(never)
    between.resume(rank, known_to(0, [None, Notes(num_calls=2, is_over=is_over)]))
    for num_left in (1, 0):
        assert rank.is_apart
        between.pass_call(rank)
        assert rank.is_apart == (num_left > 0 or is_over), "others make no further calls"


def test_ranks_that_are_replaced_anywhere_gather_what_they_would_have() -> None:
    seed = 200 * int(os.environ["SMP_GRID_SEED"])
    assert sum(gather_and_lose(random.Random(seed + index)) for index in range(200)) > 100


def gather_and_lose(dice: random.Random) -> int:
    """Runs ranks in any order; a gathering gives its numbers to some ranks if one dies in it.

    Returns:
        number of deaths.
    """
    script = [dice.choice(["shard", "mp"]) for _ in range(dice.randint(1, 6))]
    ranks: list[Any] = [SimulatedRank(number, groups_of(number)) for number in range(4)]
    between = [BetweenSteps(never) for _ in ranks]
    at = [0] * 4  # position in the script
    most, num_dead = dice.randint(0, 3), 0

    def part(number: int, position: int) -> int:
        return 100 * number + position

    def waits(number: int) -> tuple[int, ...] | None:
        return ranks[number].groups[script[at[number]]] if at[number] < len(script) else None

    def advance(number: int, found: Tensor | None) -> None:
        group = waits(number)

        def gather_now() -> Tensor:
            assert found is not None, "it is known"
            return found

        between[number].gather(ranks[number], script[at[number]], gather_now)
        expected = [part(other, at[number]) for other in group or ()]
        ranks[number].done.append(between[number].notes.gathered[-1][1])
        assert ranks[number].done[-1].tolist() == expected
        at[number] += 1
        if at[number] == len(script):
            between[number].end(ranks[number])

    def are_together(number: int) -> bool:
        group = waits(number) or ()
        return bool(group) and all(at[n] == at[number] and waits(n) == group for n in group)

    while any(position < len(script) for position in at):
        known = [n for n in range(4) if (group := waits(n)) and between[n]._left.get(group)]
        if known:
            advance(dice.choice(known), None)
            continue
        group = waits(dice.choice([n for n in range(4) if are_together(n)]))
        assert group is not None
        found = torch.tensor([part(other, at[other]) for other in group])
        dies = num_dead < most and dice.random() < 0.4
        for number in group:
            if not dies or dice.random() < 0.5:
                advance(number, found)
        if dies:
            num_dead += 1
            lost = dice.randrange(4)
            noted = [None if n == lost else between[n].notes for n in range(4)]
            between[lost], at[lost], ranks[lost].done = BetweenSteps(never), 0, []
            for number in range(4):
                if not between[number].notes.is_over:
                    between[number].resume(ranks[number], known_to(number, noted))
    assert all(len(rank.done) == len(script) for rank in ranks)
    return num_dead
