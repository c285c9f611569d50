"""Pipeline schedules as text, and a simulator that runs them without processes.

A schedule has one line per pipeline rank, ``"<rank>: <actions>"``. An action is ``F3`` (forward of
microbatch 3), ``B3`` (its backward) or ``W3`` (its weight gradients, where the backward is done in
two parts); ``F3.1`` is that of the second chunk of the rank. Empty lines and text after a ``#``
are ignored. :func:`plan`, :func:`simulate` and the server write the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import smp._C as _C

POLICIES = tuple(_C.policy_names())
"""Names of the policies; the same code decides in the server and in the simulator."""


@dataclass(frozen=True)
class Stage:
    """A stage of the chain that a microbatch passes forward and back.

    Attributes:
        rank: pipeline rank that runs it. Several stages on one rank are its chunks 0, 1, ... in
            the order of the chain. A loss on the driver is a last stage on the rank of the first.
        forward_ms: time of a forward in ms.
        backward_ms: time of a backward in ms, without ``weight_ms``.
        weight_ms: time in ms of the part of a backward that may be deferred: gradients of
            parameters.
        activation_bytes: bytes kept per microbatch from the start of its forward to the end of its
            backward.
    """

    rank: int
    forward_ms: float
    backward_ms: float
    weight_ms: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True)
class Boundary:
    """A boundary between a stage and the next; nothing is sent between stages of one rank.

    Attributes:
        latency_ms: time in ms that does not depend on the size.
        ms_per_byte: time in ms per byte; transfers over one ordered pair of ranks are sequential.
        forward_bytes: bytes of the activations of one microbatch.
        backward_bytes: bytes of the gradients of these activations.
    """

    latency_ms: float = 0.0
    ms_per_byte: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class RankUsage:
    """The load of one rank in a step.

    Attributes:
        busy_ms: total time of its actions.
        bubble_ms: time of the step less ``busy_ms``.
        peak_activations: largest number of microbatches kept at once, counted per stage.
        peak_activation_bytes: largest number of their bytes kept at once.
    """

    busy_ms: float
    bubble_ms: float
    peak_activations: int
    peak_activation_bytes: int


@dataclass(frozen=True)
class TimelineEntry:
    """An action: ``rank`` runs ``action`` of ``stage`` from ``start_ms`` to ``end_ms``."""

    rank: int
    stage: int
    action: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        makespan_ms: time in ms from the first start to the last end.
        ranks: usage by pipeline rank.
        executed: actions that each rank ran, in the text form.
        timeline: actions by start time, then by rank.
    """

    makespan_ms: float
    ranks: tuple[RankUsage, ...]
    executed: str
    timeline: tuple[TimelineEntry, ...]


def plan(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> str:
    """Returns the actions of each rank in a step in which every stage takes the same time.

    Args:
        name: ``"simple"``: all forwards, then all backwards; ``"interleaved"``: 1F1B;
            ``"virtual_interleaved"``: 1F1B over ``num_chunks`` stages per rank, for a number of
            microbatches that is a multiple of the ranks; ``"zero_bubble"``: ZB-H1.
        num_ranks: number of pipeline ranks.
        num_microbatches: number of microbatches of the step.
        num_chunks: stages per rank.

    Raises:
        ValueError: the name is unknown, or the numbers are impossible.
    """
    return _C.plan_schedule(name, num_ranks, num_microbatches, num_chunks)


def simulate(
    stages: Sequence[Stage],
    num_microbatches: int,
    schedule: str = _C.DEFAULT_POLICY,
    *,
    boundaries: Sequence[Boundary] = (),
    active_microbatches: int | None = None,
) -> Simulation:
    """Runs a step without processes, under the rules of the server.

    A task is ready when its data are there. A rank runs one task at a time, and the policy picks
    among the ready ones. The rank of the first stage admits microbatches, at most
    ``active_microbatches`` at once; a microbatch ends when its backward has left the first stage.
    The result depends only on the arguments.

    Args:
        stages: stages of the chain, in order.
        num_microbatches: number of microbatches of the step.
        schedule: name of a policy, or a schedule in the text form.
        boundaries: boundaries between stages, one fewer than ``stages``; empty if transfers cost
            nothing.
        active_microbatches: largest number in flight; None for the default of the policy, or for
            all with a text.

    Raises:
        ValueError: costs or lists make no sense; the text has the position.
        RuntimeError: the schedule cannot finish; the text names the next action of each rank and
            what it waits for.
    """
    run = _C.simulate_lists if ":" in schedule else _C.simulate_policy
    result = run(
        [
            _C.StageCost(s.rank, s.forward_ms, s.backward_ms, s.weight_ms, s.activation_bytes)
            for s in stages
        ],
        [
            _C.BoundaryCost(b.latency_ms, b.ms_per_byte, b.forward_bytes, b.backward_bytes)
            for b in boundaries
        ],
        num_microbatches,
        _checked_active(active_microbatches),
        schedule,
    )
    return Simulation(
        makespan_ms=result.makespan_ms,
        ranks=tuple(
            RankUsage(r.busy_ms, r.bubble_ms, r.peak_activations, r.peak_activation_bytes)
            for r in result.ranks
        ),
        executed=result.executed,
        timeline=tuple(
            TimelineEntry(e.rank, e.stage, e.action, e.start_ms, e.end_ms) for e in result.timeline
        ),
    )


def normalize(text: str) -> str:
    """Returns the schedule as the library itself writes it, so that two texts can be compared.

    Raises:
        ValueError: the text is no schedule; the error names line and column.
    """
    return _C.normalize_schedule(text)


def executed_actions(order: Sequence[str], chunk_of_module: Mapping[int, int]) -> str:
    """Returns the tasks that a server has executed, as actions of a schedule.

    Successive tasks of one action make one entry; a task that continues after a wait belongs to
    the entry where it began.

    Args:
        order: result of ``smp.metrics.executed_order()``.
        chunk_of_module: chunk of each module that ran here, by the number after ``m`` in
            ``order``. Bodies of the step function are chunk 0.

    Raises:
        ValueError: a module is missing or a task cannot be read.
    """
    return _C.executed_actions(list(order), dict(chunk_of_module))


def _checked_active(active_microbatches: int | None) -> int:
    if active_microbatches is None:
        return 0
    if active_microbatches < 1:
        raise ValueError(
            f"active_microbatches must be 1 or more, or None for the default of the policy; "
            f"got {active_microbatches}"
        )
    return active_microbatches
