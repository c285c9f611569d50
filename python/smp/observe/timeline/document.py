"""Joins the recordings of all ranks into the document that page and Chrome trace show."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from smp.observe.timeline.events import Event, RankRecording
from smp.observe.timeline.plan import Plan, make_plan


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way, between global ranks."""

    source: int
    target: int
    sent_ns: int
    received_ns: int
    num_bytes: int
    mb: int
    step: int
    what: str


@dataclass(frozen=True)
class LaneTrack:
    """Copies of the lanes between two ranks that do not overlap each other.

    Attributes:
        name: "lane to rank 1"; further tracks at the same time have a number.
        copies: copies of one rank, by begin.
    """

    name: str
    copies: tuple[Event, ...]


@dataclass(frozen=True)
class StepSpan:
    """A call of a step function by one replica.

    Attributes:
        number: number of the step, counted from 0 since the partition.
        replica: global ranks.
        begin_ns, end_ns: begin and end of the calls, over all ranks of the replica.
        first_ns, last_ns: begin of the first and end of the last task.
        num_microbatches: number of microbatches of the driver.
        busy_ns: sum of task times by global rank; of the device if it was recorded.
        plan: simulation of the same step without disturbances.
    """

    number: int
    replica: tuple[int, ...]
    begin_ns: int
    end_ns: int
    first_ns: int
    last_ns: int
    num_microbatches: int
    busy_ns: dict[int, int]
    plan: Plan

    @property
    def makespan_ns(self) -> int:
        return self.last_ns - self.first_ns

    def bubble(self, rank: int) -> float:
        """Returns the fraction of the makespan in which this rank ran no task."""
        if self.makespan_ns <= 0:
            return 0.0
        return 1.0 - self.busy_ns[rank] / self.makespan_ns

    def planned_bubble(self, rank: int) -> float | None:
        """Returns the same fraction of the plan; None if there is no plan."""
        if self.plan.bubble is None:
            return None
        return self.plan.bubble.get(self.replica.index(rank), 1.0)


@dataclass(frozen=True)
class Document:
    """The recordings of all ranks as they are shown; times are on the clock of rank 0.

    Attributes:
        ranks: recordings, grouped by replica, then by pipeline rank.
        steps: spans by number, then by replica.
        transfers: tensors of which both ends were recorded.
        num_unpaired: number of tensors of which only one end was recorded.
        begin_ns, end_ns: begin and end of all steps.
    """

    ranks: tuple[RankRecording, ...]
    steps: tuple[StepSpan, ...]
    transfers: tuple[Transfer, ...]
    num_unpaired: int
    begin_ns: int
    end_ns: int
    notes: tuple[str, ...] = field(default=())

    def bubble(self, rank: int) -> float:
        """Returns the bubble of a rank over all steps."""
        steps = [step for step in self.steps if rank in step.busy_ns]
        total = sum(step.makespan_ns for step in steps)
        busy = sum(step.busy_ns[rank] for step in steps)
        return 1.0 - busy / total if total > 0 else 0.0


def build(recordings: Sequence[RankRecording]) -> Document:
    """Joins the recordings.

    Raises:
        ValueError: no step was recorded.
    """
    ranks = tuple(sorted(recordings, key=lambda r: (r.replica[0], r.pp_rank)))
    transfers, num_unpaired = pair_transfers(ranks)
    steps = tuple(
        sorted(
            (
                span
                for replica in dict.fromkeys(r.replica for r in ranks)
                for span in _spans([r for r in ranks if r.replica == replica], transfers)
            ),
            key=lambda span: (span.number, span.replica),
        )
    )
    if not steps:
        raise ValueError("no step was recorded; call step functions between begin and end of it")
    return Document(
        ranks,
        steps,
        transfers,
        num_unpaired,
        min(span.begin_ns for span in steps),
        max(span.end_ns for span in steps),
        tuple(_notes(ranks, steps, num_unpaired)),
    )


def pair_transfers(ranks: Sequence[RankRecording]) -> tuple[tuple[Transfer, ...], int]:
    """Joins the two ends of each tensor, and counts ends without a counterpart.

    Tensors of one name from one rank to another arrive in the order in which they were sent.
    Tensors of steps that were not recorded do not count.
    """
    steps = {event.step for rank in ranks for event in rank.of_kind("step")}
    waiting: dict[tuple[object, ...], deque[Event]] = defaultdict(deque)
    num_sent = num_received = 0
    for rank in ranks:
        for event in _of_steps(rank, "sent", steps):
            num_sent += 1
            waiting[_name(rank.rank, event.peer, event)].append(event)
    transfers = []
    for rank in ranks:
        for event in _of_steps(rank, "received", steps):
            num_received += 1
            queue = waiting.get(_name(event.peer, rank.rank, event))
            if not queue:
                continue
            sent = queue.popleft()
            transfers.append(
                Transfer(
                    event.peer,
                    rank.rank,
                    sent.begin_ns,
                    # Clocks of two hosts agree only within the uncertainty.
                    max(event.begin_ns, sent.begin_ns),
                    event.num_bytes,
                    event.mb,
                    event.step,
                    event.what,
                )
            )
    transfers.sort(key=lambda t: (t.sent_ns, t.source, t.target))
    return tuple(transfers), num_sent + num_received - 2 * len(transfers)


def lane_tracks(rank: RankRecording) -> list[LaneTrack]:
    """Returns copies over lanes by peer, in tracks without overlap, as viewers need them."""
    by_way: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for kind in ("lane sent", "lane received"):
        for event in rank.of_kind(kind):
            by_way[kind, event.peer].append(event)
    tracks = []
    for (kind, peer), events in sorted(
        by_way.items(), key=lambda item: (item[0][0] != "lane sent", item[0][1])
    ):
        name = f"lane {'to' if kind == 'lane sent' else 'from'} rank {peer}"
        found: list[list[Event]] = []
        for event in sorted(events, key=lambda e: (e.begin_ns, e.end_ns)):
            free = next((t for t in found if t[-1].end_ns <= event.begin_ns), None)
            if free is None:
                free = []
                found.append(free)
            free.append(event)
        tracks += [
            LaneTrack(f"{name} ({number})" if number > 1 else name, tuple(track))
            for number, track in enumerate(found, start=1)
        ]
    return tracks


def _of_steps(rank: RankRecording, kind: str, steps: set[int]) -> list[Event]:
    return [event for event in rank.of_kind(kind) if event.step in steps]


def _name(source: int, target: int, event: Event) -> tuple[object, ...]:
    tensor = (event.ref_rank, event.ref_id, event.num_bytes)
    return (source, target, event.what, event.step, event.mb, *tensor)


def _spans(replica: Sequence[RankRecording], transfers: Sequence[Transfer]) -> list[StepSpan]:
    calls: dict[int, list[Event]] = defaultdict(list)
    runs: dict[int, dict[int, list[Event]]] = defaultdict(lambda: {r.rank: [] for r in replica})
    for rank in replica:
        for event in rank.of_kind("step"):
            calls[event.step].append(event)
        for event in rank.tasks:
            runs[event.step][rank.rank].append(event)
    spans = []
    for number, ends in sorted(calls.items()):
        events = [event for own in runs[number].values() for event in own]
        begin = min(event.begin_ns for event in ends)
        end = max(event.end_ns for event in ends)
        count = max(event.ref_id for event in ends)
        spans.append(
            StepSpan(
                number,
                replica[0].replica,
                begin,
                end,
                min((event.begin_ns for event in events), default=begin),
                max((event.end_ns for event in events), default=begin),
                count,
                {r: sum(e.duration_ns for e in own) for r, own in runs[number].items()},
                _plan(replica, runs[number], transfers, number, count),
            )
        )
    return spans


def _plan(
    replica: Sequence[RankRecording],
    runs: dict[int, list[Event]],
    transfers: Sequence[Transfer],
    step: int,
    num_microbatches: int,
) -> Plan:
    pp_rank = {r.rank: r.pp_rank for r in replica}
    hops: dict[tuple[int, int], list[int]] = defaultdict(list)
    for t in transfers:
        if t.step == step and t.source in pp_rank and t.target in pp_rank:
            hops[pp_rank[t.source], pp_rank[t.target]].append(t.received_ns - t.sent_ns)
    return make_plan(
        {pp_rank[rank]: own for rank, own in runs.items()},
        hops,
        num_microbatches,
        replica[0].policy,
        replica[0].active_microbatches,
    )


def _notes(
    ranks: Sequence[RankRecording], steps: Sequence[StepSpan], num_unpaired: int
) -> list[str]:
    notes = [
        f"rank {r.rank}: {r.num_dropped} older events were dropped; trace fewer steps at once, or "
        "pass a larger max_events"
        for r in ranks
        if r.num_dropped
    ]
    notes += [f"step {s.number}: no plan: {s.plan.note}" for s in steps if s.plan.note]
    if num_unpaired:
        notes.append(
            f"{num_unpaired} tensors have no arrow: their other end was not recorded "
            "(dropped, or outside of the trace)"
        )
    worst = max(ranks, key=lambda r: r.uncertainty_ns)
    if worst.uncertainty_ns:
        notes.append(
            f"clocks of different hosts agree within {worst.uncertainty_ns / 1e3:.0f} µs or better"
        )
    inexact = max(
        (e for r in ranks for e in r.events), key=lambda e: e.uncertainty_ns, default=None
    )
    if inexact is not None and inexact.uncertainty_ns:
        notes.append(
            "times of devices agree with the clock of their host within "
            f"{inexact.uncertainty_ns / 1e3:.0f} µs or better; their lengths are the devices' own"
        )
    return notes
