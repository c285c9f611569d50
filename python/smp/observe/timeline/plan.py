"""Simulates the schedule with the measured task times and without disturbances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from smp.observe.timeline.events import Event
from smp.pipeline import schedules as schedule

_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True)
class Planned:
    """An action of the plan; times are nanoseconds since the step began."""

    pp_rank: int
    phase: int
    mb: int
    begin_ns: float
    end_ns: float


@dataclass(frozen=True)
class Plan:
    """A simulated step.

    Attributes:
        actions: actions that take time.
        makespan_ns: duration of the step.
        bubble: fraction of the step in which a rank has nothing to do, by pipeline rank.
        note: reason why there is no plan, or "".
    """

    actions: tuple[Planned, ...] = ()
    makespan_ns: float = 0.0
    bubble: Mapping[int, float] | None = None
    note: str = ""


def make_plan(
    runs: Mapping[int, Sequence[Event]],
    hops: Mapping[tuple[int, int], Sequence[int]],
    num_microbatches: int,
    policy: str,
    active_microbatches: int | None,
) -> Plan:
    """Simulates a step from its measured times.

    Args:
        runs: tasks of the step, by pipeline rank; the driver is 0.
        hops: transfer times of tensors by pair of pipeline ranks, in ns.
        num_microbatches: number of microbatches of the step.
        policy, active_microbatches: the configured schedule.
    """
    stages = chain(runs, num_microbatches)
    if not stages:
        return Plan(note="no task was recorded")
    used = sorted({rank for rank, _, _ in stages})
    boundaries = [
        schedule.Boundary(latency_ms=_latency_ms(hops, here[0], there[0]))
        for here, there in zip(stages, stages[1:], strict=False)
    ]
    try:
        simulation = schedule.simulate(
            [schedule.Stage(used.index(rank), f / 1e6, b / 1e6) for rank, f, b in stages],
            num_microbatches,
            policy,
            boundaries=boundaries,
            active_microbatches=active_microbatches,
        )
    except (ValueError, RuntimeError) as error:
        return Plan(note=str(error))
    actions = tuple(
        Planned(
            used[entry.rank],
            "FBW".index(entry.action[0]),
            int(entry.action[1:].split(".")[0]),
            entry.start_ms * 1e6,
            entry.end_ms * 1e6,
        )
        for entry in simulation.timeline
        if entry.end_ms > entry.start_ms
    )
    makespan_ms = simulation.makespan_ms
    bubble = {
        used[index]: usage.bubble_ms / makespan_ms if makespan_ms > 0 else 0.0
        for index, usage in enumerate(simulation.ranks)
    }
    return Plan(actions, makespan_ms * 1e6, bubble)


def chain(
    runs: Mapping[int, Sequence[Event]], num_microbatches: int
) -> list[tuple[int, float, float]]:
    """Returns stages as (pipeline rank, mean ns of a forward, mean ns of a backward).

    Each rank is one stage, in the order in which the first microbatch reached them. The driver is
    the first stage, and also the last one with the tasks that follow the others (a head, the loss).
    """
    others = {rank: list(events) for rank, events in runs.items() if rank != 0 and events}
    first_ns = {rank: min(event.begin_ns for event in events) for rank, events in others.items()}
    driver = list(runs.get(0, ()))
    head, tail = _split_driver(driver, [e for events in others.values() for e in events])
    stages = [(0, *_means(head, num_microbatches))] if driver else []
    stages += [
        (rank, *_means(others[rank], num_microbatches))
        for rank in sorted(others, key=lambda rank: first_ns[rank])
    ]
    if tail:
        stages.append((0, *_means(tail, num_microbatches)))
    return stages


def _split_driver(
    driver: Sequence[Event], others: Sequence[Event]
) -> tuple[list[Event], list[Event]]:
    """Splits tasks of the driver into those before and behind the others', per microbatch."""
    forward_end: dict[int, int] = {}
    backward_begin: dict[int, int] = {}
    for event in others:
        if event.is_body:
            continue
        if event.phase == _FORWARD:
            forward_end[event.mb] = max(forward_end.get(event.mb, 0), event.end_ns)
        else:
            backward_begin[event.mb] = min(
                backward_begin.get(event.mb, event.begin_ns), event.begin_ns
            )
    head: list[Event] = []
    tail: list[Event] = []
    for event in driver:
        if event.phase == _FORWARD:
            is_tail = event.mb in forward_end and event.begin_ns >= forward_end[event.mb]
        else:
            is_tail = event.mb in backward_begin and event.begin_ns < backward_begin[event.mb]
        (tail if is_tail else head).append(event)
    return head, tail


def _means(events: Sequence[Event], num_microbatches: int) -> tuple[float, float]:
    total: dict[int, int] = defaultdict(int)
    for event in events:
        total[min(event.phase, _BACKWARD)] += event.duration_ns
    return total[_FORWARD] / num_microbatches, total[_BACKWARD] / num_microbatches


def _latency_ms(hops: Mapping[tuple[int, int], Sequence[int]], here: int, there: int) -> float:
    times = [*hops.get((here, there), ()), *hops.get((there, here), ())]
    return max(0.0, median(times) / 1e6) if times else 0.0
