"""The agreement of survivors among simulated ranks: the real logic, a store and a clock of dicts.

With `SMP_GRID=all` 1,000 failures hit 1,024 ranks (`SMP_NUM_FAILURES` sets another number).
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

import smp._C as _C
from smp.world.shrinking import lasting_ranks, places_with_replicas
from smp.world.survivor_agreement import (
    PULSE_S,
    SILENT_S,
    Decision,
    Dismissed,
    Finished,
    NoReplicaIsWhole,
    SurvivorAgreement,
)

ALL = os.environ.get("SMP_GRID") == "all"
NUM_FAILURES = int(os.environ.get("SMP_NUM_FAILURES", "1000" if ALL else "8"))
NUM_RANKS = 1024
LOOK_S = 1.0  # longer than in a job, so that 1,024 ranks take seconds
# A lost rank is noticed after SILENT_S, or twice that if it never came. Two ranks watch each rank,
# and may be lost with it.
LIMIT_S = 6 * SILENT_S


class SimulatedStore:
    """A stand-in for `torch.distributed.Store` that counts requests."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_requests = 0

    def set(self, key: str, value: str) -> None:
        self.num_requests += 1
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self.num_requests += 1
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self.num_requests += 1
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.num_requests += 1
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.num_requests += 1
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


@dataclass
class Job:
    """Ranks of one job; ranks have the numbers that they had at its begin.

    Attributes:
        members: ranks of the present world, index = global rank in it.
        dies_s: time of death, by rank.
        sleeps: time from and to which a rank is stopped, by rank.
        outcomes: outcome of each rank, by world and work.
        ended: ranks that were dismissed.
    """

    dice: random.Random
    pp: int
    dp: int
    members: list[int]
    dies_s: dict[int, float] = field(default_factory=dict)
    sleeps: dict[int, tuple[float, float]] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], dict[int, Decision | Finished]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    now_s: float = 1000.0
    num_requests: int = 0
    num_looks: int = 0

    def grid(self) -> _C.ProcessGrid:
        return _C.ProcessGrid(len(self.members), self.pp, 1, 1, "DPT")

    def is_dead(self, rank: int) -> bool:
        return self.now_s >= self.dies_s.get(rank, float("inf"))

    def sees_the_end(self, rank: int, other: int) -> bool:
        """Returns whether the system tells a rank that another one has ended; 8 are on a host."""
        return rank // 8 == other // 8 and self.is_dead(other)

    def run(self, lives: dict[int, Iterator[float]]) -> None:
        """Runs all ranks; each yields the time until it goes on."""
        queue = [(self.now_s, rank) for rank in lives]
        begin_s = self.now_s
        while queue:
            at_s, rank = heapq.heappop(queue)
            self.now_s = at_s
            assert at_s < begin_s + LIMIT_S, f"rank {rank} hangs"
            if self.is_dead(rank):
                continue
            from_s, to_s = self.sleeps.get(rank, (0.0, 0.0))
            if from_s <= at_s < to_s:
                heapq.heappush(queue, (to_s, rank))
                continue
            pause_s = next(lives[rank], None)
            if pause_s is not None:
                heapq.heappush(queue, (at_s + pause_s, rank))


def survive(
    job: Job,
    world: int,
    rank: int,
    store: SimulatedStore,
    grid: _C.ProcessGrid,
    known: int | None,
    num_done: int,
    passed: bool,
) -> Iterator[float]:
    """Yields the waits of a rank until it has a decision.

    Args:
        known: lost rank of which the connections have told; None: of none, because ranks connect.
        num_done: works done when the failure comes.
        passed: whether the rank has passed the barrier of the work after these.
    """
    own = job.members.index(rank)
    agreement = SurvivorAgreement(
        store, grid, own, lambda other: job.sees_the_end(rank, job.members[other])
    )
    lost = [] if known is None else [job.members.index(known)]
    if known is not None:  # the ranks have connected long ago, and have been quiet since
        agreement.beat(0, job.now_s - 3 * SILENT_S)
        yield 0.0
        agreement.find_failure(job.now_s - 3 * SILENT_S)
        yield job.dice.uniform(0.0, 2.0)  # the news of the failure
    num_done += passed
    # The script computes, or the rank is in a wait that ends with the fault.
    until_s = job.now_s + job.dice.uniform(0.0, 3.0 if passed or known is None else 0.5)
    while job.now_s < until_s:
        agreement.beat(num_done, job.now_s)
        if known is None and agreement.find_failure(job.now_s) is not None:
            break
        yield LOOK_S
    agreement.stop(num_done)
    while True:
        agreement.beat(num_done, job.now_s)
        job.num_looks += 1
        try:
            outcome = agreement.look(lost, "it died", job.now_s)
        except (Dismissed, NoReplicaIsWhole):
            agreement.note_lost(own)
            job.ended.add(rank)
            return
        if outcome is not None:
            job.outcomes.setdefault((world, num_done), {})[rank] = outcome
            if isinstance(outcome, Decision):
                return
            num_done += 1
            agreement.beat(num_done, job.now_s)
            yield job.dice.uniform(0.0, 1.0)  # the script, between two steps
            agreement.stop(num_done)
        yield job.dice.uniform(0.5 * LOOK_S, LOOK_S)


def lose_ranks(job: Job, world: int, first: list[int], later: int) -> Decision | None:
    """Lets ranks die in one work, and more while the others agree.

    Returns:
        the decision of all ranks that go on; None: no replica was whole.
    """
    dice, store, grid = job.dice, SimulatedStore(), job.grid()
    for rank in first:
        job.dies_s[rank] = job.now_s
    others = [rank for rank in job.members if rank not in first]
    for rank in dice.sample(others, later):
        job.dies_s[rank] = job.now_s + dice.uniform(0.0, 4.0)
    if dice.random() < 0.3:
        sleeper = dice.choice(others)
        job.sleeps[sleeper] = (job.now_s, job.now_s + dice.uniform(0.0, 3 * SILENT_S))
    # Either all ranks had entered the barrier, and any of them may have passed it, or none has.
    share = dice.choice([0.0, 0.0, 0.01, 0.5, 0.99])
    lives = {
        rank: survive(
            job, world, rank, store, grid, dice.choice(first) if first else None, 0,
            bool(first) and dice.random() < share,
        )
        for rank in others
    }  # fmt: skip
    job.run(lives)
    job.num_requests += store.num_requests
    return check_outcomes(job, world)


def check_outcomes(job: Job, world: int) -> Decision | None:
    """Compares what the ranks of one world have decided."""
    decisions = []
    for (at, _), by_rank in job.outcomes.items():
        if at != world:
            continue
        first = next(iter(by_rank.values()))
        assert all(outcome == first for outcome in by_rank.values()), "two outcomes of one work"
        if isinstance(first, Decision):
            decisions.append((first, by_rank))
    living = [rank for rank in job.members if not job.is_dead(rank)]
    hit = [i for i, rank in enumerate(job.members) if rank in job.dies_s or rank in job.sleeps]
    unhurt = set(lasting_ranks(job.grid(), hit))
    if not decisions:
        assert not unhurt, "a replica without a failure has ended"
        assert job.ended >= set(living), "a rank has neither gone on nor ended"
        return None
    [(decision, by_rank)] = decisions
    assert unhurt <= set(decision.kept), "a replica without a failure has ended"
    kept = {job.members[index] for index in decision.kept}
    for rank in living:
        assert (rank in by_rank) == (rank in kept and rank not in job.ended), rank
    return decision


def fail_until_none_is_left(dice: random.Random, pp: int, dp: int, num_failures: int) -> Job:
    """Runs one job through failures; ranks die while others agree and while they connect."""
    job = Job(dice, pp, dp, list(range(pp * dp)))
    world, left = 0, num_failures
    while left > 0:
        first = dice.sample(job.members, min(left, dice.choice([1, 1, 1, 2, 3])))
        left -= len(first)
        while True:  # until ranks have connected
            later = min(left, dice.choice([0, 0, 1, 2]), len(job.members) - len(first))
            left -= later
            before = job.members
            decision = lose_ranks(job, world, first, later)
            world += 1
            if decision is None:
                return job
            at = lasting_ranks(job.grid(), [])
            assert set(decision.kept) <= set(at) and len(decision.kept) % pp == 0
            job.members = [before[index] for index in decision.kept]
            if not any(job.is_dead(rank) for rank in job.members):
                break
            first = []
    return job


@pytest.mark.parametrize(("pp", "dp"), [(1, NUM_RANKS), (4, NUM_RANKS // 4)])
def test_all_ranks_that_go_on_take_one_decision_in_bounded_time(pp: int, dp: int) -> None:
    dice = random.Random(int(os.environ["SMP_GRID_SEED"]))
    left, num_requests, num_looks = NUM_FAILURES // 2, 0, 0
    while left > 0:
        job = fail_until_none_is_left(dice, pp, dp, min(left, 50))
        left -= 50
        num_requests, num_looks = num_requests + job.num_requests, num_looks + job.num_looks
        assert any(isinstance(o, Decision) for by in job.outcomes.values() for o in by.values())
    assert num_requests < 15 * num_looks, "requests do not grow with the number of ranks"
    assert PULSE_S < SILENT_S < LIMIT_S


def test_a_process_that_has_ended_is_lost_at_once() -> None:
    store, grid = SimulatedStore(), _C.ProcessGrid(3, 1, 1, 1, "DPT")
    assert SurvivorAgreement(store, grid, 0).find_failure(0.0) is None
    assert SurvivorAgreement(store, grid, 0, lambda rank: rank == 1).find_failure(0.0) == 1


def join_growth(
    job: Job, rank: int, store: SimulatedStore, larger: Decision, refuses: bool, noticed_s: float
) -> Iterator[float]:
    """Yields the waits of a rank from the step before the one at which all stop to grow.

    Args:
        refuses: whether this rank cannot let others in.
        noticed_s: time at which it knows of a death, if one comes.
    """
    agreement = SurvivorAgreement(store, job.grid(), rank)
    if rank == 0:
        agreement.plan_growth(0, larger)
    yield job.dice.uniform(0.1, 3.0)  # the step ends with a barrier; then the script
    assert agreement.is_for_growing(1)
    if refuses:
        agreement.refuse_growth(1)
    agreement.stop(1)
    while True:
        lost = [other for other in job.members if job.is_dead(other)]
        lost = lost if job.now_s >= noticed_s else []
        if lost:
            agreement.beat(1, job.now_s)
        job.num_looks += 1
        try:
            outcome = agreement.look(lost[:1], "it died", job.now_s, is_calm=not lost)
        except (Dismissed, NoReplicaIsWhole):
            job.ended.add(rank)
            return
        if outcome is not None:
            job.outcomes.setdefault((0, 1), {})[rank] = outcome
            return
        yield job.dice.uniform(0.5 * LOOK_S, LOOK_S)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(("pp", "dp"), [(1, NUM_RANKS), (4, NUM_RANKS // 4)])
def test_all_ranks_let_further_ones_in_or_none_does(
    pp: int, dp: int, dies: bool, refuses: bool
) -> None:
    dice = random.Random(int(os.environ["SMP_GRID_SEED"]))
    job, store = Job(dice, pp, dp, list(range(pp * dp))), SimulatedStore()
    kept = places_with_replicas(job.grid(), dp + 1)
    newcomers = [(place, 9000 + place) for place, rank in enumerate(kept) if rank < 0]
    larger = Decision(kept, "more can join", newcomers)
    assert len(newcomers) == pp and sorted(kept)[pp:] == job.members
    if dies:
        job.dies_s[dice.choice(job.members)] = job.now_s + dice.uniform(0.0, 4.0)
    # The hub tells of a death soon, but not at once.
    noticed_s = [min(job.dies_s.values(), default=0.0) + dice.uniform(0.1, 1.0) for _ in kept]
    refusing = dice.choice(job.members) if refuses else -1
    job.run(
        {
            rank: join_growth(job, rank, store, larger, rank == refusing, noticed_s[rank])
            for rank in job.members
        }
    )
    outcomes = job.outcomes[0, 1]
    first = next(iter(outcomes.values()))
    assert all(outcome == first for outcome in outcomes.values())
    living = {rank for rank in job.members if not job.is_dead(rank)}
    assert living <= set(outcomes) | job.ended
    if isinstance(first, Decision) and not first.newcomers:
        assert dies and set(lasting_ranks(job.grid(), job.dies_s)) == set(first.kept)
        assert job.ended <= living - set(first.kept)
    else:
        assert not job.ended and first == (Finished() if refuses else larger)
    assert store.num_requests < 15 * job.num_looks, "requests do not grow with the number of ranks"
