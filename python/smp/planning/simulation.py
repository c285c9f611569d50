"""Simulates the schedule of a plan, and proves that it cannot deadlock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from smp.partition.decision import Decision
from smp.pipeline import schedules
from smp.planning.reasons import evaluated, times_of
from smp.planning.run_cuts import Run

#: Milliseconds that the simulator counts for a microbatch of the whole model on one rank.
WHOLE = 1000.0


class Wait(NamedTuple):
    """An action that another one waits for: its rank and name, and the reason in words."""

    rank: int
    action: str
    why: str


@dataclass(frozen=True)
class Proof:
    """An order of all actions in which each comes after everything that it waits for.

    Attributes:
        order: rank, action and its waits, in this order.
    """

    order: tuple[tuple[int, str, tuple[Wait, ...]], ...]

    @property
    def num_waits(self) -> int:
        """Returns the number of waits of all actions."""
        return sum(len(waits) for _, _, waits in self.order)


class NotOrdered(Exception):
    """An action of a schedule comes before something that it waits for, or is missing."""


def stages_of(decision: Decision, run: Run, microbatch_ms: float | None) -> list[schedules.Stage]:
    """Returns the chain that a microbatch passes, with times of a partition.

    Args:
        decision: the partition, with costs.
        run: run whose schedule decides how many activations ranks keep.
        microbatch_ms: milliseconds of forward and backward of one microbatch in one process; None:
            `WHOLE`.

    Raises:
        ValueError: no costs are known.
    """
    evaluation, options = evaluated(decision, run)
    times = times_of(decision, evaluation, options)
    if not times:
        raise ValueError("the model computes nothing that was traced, so stages have no times")
    unit = (microbatch_ms or WHOLE) / WHOLE
    return [
        schedules.Stage(
            time.pp_rank,
            unit * time.forward,
            unit * time.backward,
            unit * time.weight,
            int(num_bytes),
        )
        for time, num_bytes in zip(times, evaluation.activation_bytes, strict=True)
    ]


_Action = tuple[str, int, int]  # kind, stage, microbatch


def prove(
    simulation: schedules.Simulation, num_stages: int, num_microbatches: int, active: int
) -> Proof:
    """Checks that every action of a simulated step comes after everything that it waits for.

    The waits are those of the server: for the previous action of the rank, for the same microbatch
    in the stage before (forward) or after (backward), and for a place among those in flight. This
    function shares no code with the simulator.

    Args:
        simulation: simulation of the step.
        num_stages: number of stages of the chain.
        num_microbatches: number of microbatches of the step.
        active: largest number of microbatches in flight.

    Raises:
        NotOrdered: an action comes before something that it waits for, or is missing.
    """
    done: dict[_Action, tuple[int, str]] = {}  # with rank and name
    last: dict[int, str] = {}
    order = []
    in_flight = 0
    # Actions without duration come before others that begin at the same time.
    entries = sorted(
        simulation.timeline,
        key=lambda e: (e.start_ms, e.end_ms, "FBW".index(e.action[0]), e.rank),
    )
    for entry in entries:
        kind, mb = entry.action[0], int(entry.action[1:].split(".")[0])
        waits = []
        if entry.rank in last:
            waits.append(Wait(entry.rank, last[entry.rank], "the rank runs one at a time"))
        for needed, why in _needs(kind, entry.stage, mb, num_stages):
            if needed not in done:
                raise NotOrdered(f"rank {entry.rank} runs {entry.action} before {needed[0]}{mb}")
            waits.append(Wait(*done[needed], why))
        if entry.stage == 0:
            in_flight += {"F": 1, "B": -1, "W": 0}[kind]
        if in_flight > active:
            raise NotOrdered(f"rank {entry.rank} lets {in_flight} microbatches in")
        done[kind, entry.stage, mb] = (entry.rank, entry.action)
        last[entry.rank] = entry.action
        order.append((entry.rank, entry.action, tuple(waits)))
    expected = num_stages * num_microbatches * len({kind for kind, _, _ in done} | {"F", "B"})
    if len(done) != expected:
        raise NotOrdered(f"{len(done)} of {expected} actions are there")
    return Proof(tuple(order))


def _needs(kind: str, stage: int, mb: int, num_stages: int) -> list[tuple[_Action, str]]:
    if kind == "W":
        return [(("B", stage, mb), "gradients of weights come after the backward")]
    if kind == "F":
        return [(("F", stage - 1, mb), "its input")] if stage > 0 else []
    needs = [(("F", stage, mb), "its activations")]
    if stage + 1 < num_stages:
        needs.append((("B", stage + 1, mb), "the gradient of what it gave on"))
    return needs


def proof_in_words(proof: Proof, schedule: str, active: int) -> list[str]:
    """Explains to a reader who checks it why ranks cannot wait for each other for ever.

    Args:
        proof: proof for one step.
        schedule: name of the policy.
        active: largest number of microbatches in flight.
    """
    ranks = len({rank for rank, _, _ in proof.order})
    return [
        f"Each of the {ranks} ranks runs its actions in the order that is shown ({schedule}). An "
        "action waits for three things only: for the one before it on its rank; for data of the "
        "same microbatch (a forward for that of the stage before, a backward for that of the stage "
        "behind and for its own forward, gradients of weights for their backward); and a first "
        f"forward for a place, since at most {active} microbatches are in flight.",
        f"A deadlock is a circle of waits. In one order of all {len(proof.order)} actions each "
        f"stands behind everything that it waits for: the {proof.num_waits} waits for actions were "
        "followed one by one, and each points backward. A circle would have to point forward "
        "somewhere, so there is none, however long actions take and however late data come.",
        "The order is that of the estimated times. Where data come later the policy picks "
        "another action that is ready; that its steps end with any times is tested, not proved "
        "here (tests/cpp/schedule).",
    ]
