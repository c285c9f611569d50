"""Brings the recordings of all ranks to rank 0, on one clock."""

from __future__ import annotations

import socket

import smp._C as _C
from smp.observe.timeline.events import RankRecording, to_events
from smp.world import comm, runtime
from smp.world.rendezvous import machine_id

_ROUNDS = 10


def own_recording(current: runtime.Runtime) -> RankRecording:
    """Takes the events of this rank's recorder."""
    rows, num_dropped = current.timeline.take()
    # A pipeline counts the passes of the check of the loss as steps.
    passes = 0 if current.pipeline is None else current.steps.num_passes
    names = () if current.server is None else tuple(current.server.module_names)
    return RankRecording(
        rank=current.rank.global_rank,
        pp_rank=current.rank.ranks["pp"],
        replica=tuple(current.rank.groups["pp"]),
        place=current.rank.grid.describe(current.rank.global_rank),
        machine=machine_id(socket.gethostname()),
        module_names=names,
        policy=current.rank.config.pipeline,
        active_microbatches=current.rank.config.active_microbatches,
        events=to_events(rows, passes),
        num_dropped=num_dropped,
    )


def gather(current: runtime.Runtime) -> list[RankRecording]:
    """Returns all recordings by rank, aligned, on rank 0; [] on other ranks. Collective."""
    own = own_recording(current)
    if current.rank.global_rank != 0:
        _answer_clock_questions()
        comm.send(own, 0, comm.RankType.WORLD_RANK)
        return []
    recordings = [own]
    for peer in range(1, current.rank.world_size):
        offset_ns, uncertainty_ns = _ask_clock(peer)
        other: RankRecording = comm.recv_from(peer, comm.RankType.WORLD_RANK)
        same_clock = other.machine == own.machine and abs(offset_ns) <= uncertainty_ns
        recordings.append(other.aligned(*((0, 0) if same_clock else (offset_ns, uncertainty_ns))))
    return recordings


def estimate(rounds: list[tuple[int, int, int]]) -> tuple[int, int]:
    """Estimates the offset of a clock and its uncertainty, from questions and answers.

    The answer was given somewhere between question and arrival, so the quickest round is the most
    exact one (Cristian's algorithm, as in NTP).

    Args:
        rounds: (asked, clock of the other rank, arrived); the first and last on the own clock.
    """
    asked, other, arrived = min(rounds, key=lambda r: r[2] - r[0])
    return other - (asked + arrived) // 2, (arrived - asked + 1) // 2


def _ask_clock(peer: int) -> tuple[int, int]:
    rounds = []
    for _ in range(_ROUNDS):
        asked = _C.Timeline.now_ns()
        comm.send(None, peer, comm.RankType.WORLD_RANK)
        other: int = comm.recv_from(peer, comm.RankType.WORLD_RANK)
        rounds.append((asked, other, _C.Timeline.now_ns()))
    return estimate(rounds)


def _answer_clock_questions() -> None:
    for _ in range(_ROUNDS):
        comm.recv_from(0, comm.RankType.WORLD_RANK)
        comm.send(_C.Timeline.now_ns(), 0, comm.RankType.WORLD_RANK)
