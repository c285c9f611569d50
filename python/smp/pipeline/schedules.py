"""Pipeline schedules as text, and a simulator that runs them without processes.

A schedule has one line per pipeline rank, ``"<rank>: <actions>"``. An action is ``F3`` (forward of
microbatch 3), ``B3`` (its backward) or ``W3`` (its weight gradients, where the backward is done in
two parts); ``F3.1`` is that of the second chunk of the rank. Empty lines and what follows a ``#``
do not matter. The same text comes out of :func:`plan`, :func:`simulate` and the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import smp._C as _C

POLICIES = tuple(_C.policy_names())
"""Names of the policies; the same code decides in the server and in the simulator."""


@dataclass(frozen=True)
class Stage:
    """One stage of the chain that a microbatch passes forward and back.

    Attributes:
        rank: pipeline rank that runs it; several stages may be on one rank, and are its chunks
            0, 1, ... in the order of the chain. A loss on the driver is a last stage on the rank
            of the first.
        forward_ms: time of a forward.
        backward_ms: time of a backward, without what ``weight_ms`` says.
        weight_ms: the part of a backward that may be put off: gradients of parameters.
        activation_bytes: kept per microbatch from the begin of its forward to the end of its
            backward.
    """

    rank: int
    forward_ms: float
    backward_ms: float
    weight_ms: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True)
class Boundary:
    """What lies between a stage and the next; nothing is sent between stages of one rank.

    Attributes:
        latency_ms: time that does not depend on the size.
        ms_per_byte: transfers over one ordered pair of ranks pass one after the other.
        forward_bytes: activations of one microbatch.
        backward_bytes: their gradients.
    """

    latency_ms: float = 0.0
    ms_per_byte: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class RankUsage:
    """What the step asks of one rank.

    Attributes:
        busy_ms: sum of its actions.
        bubble_ms: time of the step less ``busy_ms``.
        peak_activations: most microbatches kept at once, counted per stage.
        peak_activation_bytes: most bytes of them kept at once.
    """

    busy_ms: float
    bubble_ms: float
    peak_activations: int
    peak_activation_bytes: int


@dataclass(frozen=True)
class TimelineEntry:
    """One action: ``rank`` runs ``action`` of ``stage`` from ``start_ms`` to ``end_ms``."""

    rank: int
    stage: int
    action: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        makespan_ms: from the first begin to the last end.
        ranks: by pipeline rank.
        executed: what each rank ran, in the text form.
        timeline: actions by begin, then by rank.
    """

    makespan_ms: float
    ranks: tuple[RankUsage, ...]
    executed: str
    timeline: tuple[TimelineEntry, ...]


def plan(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> str:
    """What each rank does in a step in which every stage takes the same time.

    Args:
        name: ``"simple"``: all forwards, then all backwards; ``"interleaved"``: 1F1B;
            ``"virtual_interleaved"``: 1F1B over ``num_chunks`` stages per rank, for a number of
            microbatches that is a multiple of the ranks; ``"zero_bubble"``: ZB-H1.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of the step.
        num_chunks: stages per rank.

    Raises:
        ValueError: for another name or impossible numbers.
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

    A task is ready when its data are there, a rank runs one at a time, and the policy picks among
    the ready ones. The rank of the first stage lets microbatches in, at most
    ``active_microbatches`` at once; one is over when its backward has left the first stage. The
    result depends on the arguments only.

    Args:
        stages: the chain, in order.
        num_microbatches: microbatches of the step.
        schedule: name of a policy, or a schedule in the text form.
        boundaries: one fewer than ``stages``; none if transfers cost nothing.
        active_microbatches: None for the default of the policy; all of them with a text.

    Raises:
        ValueError: for costs or lists that make no sense, with position.
        RuntimeError: if the schedule cannot finish; names the next action of each rank and what it
            waits for.
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
    """The schedule as the library itself writes it, so that two texts can be compared.

    Raises:
        ValueError: if it is no schedule; names line and column.
    """
    return _C.normalize_schedule(text)


def executed_actions(order: Sequence[str], chunk_of_module: Mapping[int, int]) -> str:
    """Tasks that a server has executed, as actions of a schedule.

    Tasks of one action in a row make one entry; a task that goes on after a wait belongs to the
    entry where it began.

    Args:
        order: what ``smp.metrics.executed_order()`` gives.
        chunk_of_module: chunk of each module that ran here, by the number behind ``m`` in
            ``order``. Bodies of the step function are chunk 0.

    Raises:
        ValueError: if a module is missing or a task cannot be read.
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
