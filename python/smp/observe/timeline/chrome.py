"""Writes the Chrome trace event format, which chrome://tracing and Perfetto open.

Source: "Trace Event Format" of the Chromium project (catapult).
"""

from __future__ import annotations

from typing import Any

from smp.observe.timeline.document import Document, StepSpan, lane_tracks
from smp.observe.timeline.events import PHASES, Event, RankRecording

# "device" is named only if it has boxes. The threads of lanes, if any, follow behind these.
_THREADS = ("executed", "planned", "idle", "tensors sent", "tensors received", "device")
EXECUTED, _PLANNED, _IDLE, _SENT, _RECEIVED, DEVICE = range(len(_THREADS))
CATEGORIES = ("forward", "backward", "weight gradients")
# An arrow has to start and end on a box; the boxes of tensors are as narrow as possible.
_ARROW_END_US = 1.0


def to_chrome(document: Document) -> dict[str, Any]:
    """Returns the JSON object: processes are ranks, times are microseconds of the trace."""
    events: list[dict[str, Any]] = []
    for index, rank in enumerate(document.ranks):
        events += _metadata(rank, index)
        for number, event in enumerate(rank.events):
            events += _of_rank(rank, event, document.begin_ns, f"{rank.rank}.{number}")
        events += _lanes(rank, document.begin_ns)
    events += _planned(document)
    events += _transfers(document)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "bubble": {str(r.rank): round(document.bubble(r.rank), 6) for r in document.ranks},
            "clock_uncertainty_us": {str(r.rank): r.uncertainty_ns / 1e3 for r in document.ranks},
            "notes": list(document.notes),
            "policy": document.ranks[0].policy,
            "pp_rank": {str(r.rank): r.pp_rank for r in document.ranks},
            "steps": [_step(step, document.begin_ns) for step in document.steps],
        },
    }


def _step(step: StepSpan, origin_ns: int) -> dict[str, Any]:
    """Returns the figures of one step of one replica."""
    return {
        "number": step.number,
        "begin_us": _us(step.begin_ns, origin_ns),
        "end_us": _us(step.end_ns, origin_ns),
        "microbatches": step.num_microbatches,
        "makespan_us": step.makespan_ns / 1e3,
        "planned_us": step.plan.makespan_ns / 1e3 if step.plan.bubble is not None else None,
        "ranks": {
            str(rank): {
                "busy_us": step.busy_ns[rank] / 1e3,
                "bubble": round(step.bubble(rank), 6),
                "planned_bubble": step.planned_bubble(rank),
            }
            for rank in step.busy_ns
        },
    }


def _us(time_ns: float, origin_ns: float) -> float:
    return round((time_ns - origin_ns) / 1e3, 3)


def _metadata(rank: RankRecording, index: int) -> list[dict[str, Any]]:
    base = {"ph": "M", "pid": rank.rank, "tid": 0}
    process = f"rank {rank.rank} ({rank.place})"
    names = list(_THREADS if rank.of_kind("device") else _THREADS[:DEVICE])
    threads = [*enumerate(names), *_lane_names(rank)]
    return [
        base | {"name": "process_name", "args": {"name": process}},
        base | {"name": "process_sort_index", "args": {"sort_index": index}},
        *(
            base | {"name": "thread_name", "tid": tid, "args": {"name": name}}
            for tid, name in threads
        ),
        *(
            base | {"name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}
            for tid, _ in threads
        ),
    ]


def _of_rank(
    rank: RankRecording, event: Event, origin_ns: int, identifier: str
) -> list[dict[str, Any]]:
    base: dict[str, Any] = {"pid": rank.rank, "ts": _us(event.begin_ns, origin_ns)}
    duration = event.duration_ns / 1e3
    name = rank.name_of(event)
    label = f"{PHASES[event.phase]}{event.mb} {name}"
    args = {"step": event.step, "microbatch": event.mb, "module": name, "task": event.task}
    awaited = event.what + (f" of rank {event.peer}" if event.peer >= 0 else "")
    if event.kind == "run":
        category = CATEGORIES[event.phase]
        box = {"ph": "X", "tid": EXECUTED, "dur": duration, "name": label, "cat": category}
        return [base | box | {"args": args}]
    if event.kind == "device":
        category = CATEGORIES[event.phase]
        box = {"ph": "X", "tid": DEVICE, "dur": duration, "name": label, "cat": category}
        args["uncertainty_us"] = event.uncertainty_ns / 1e3
        return [base | box | {"args": args}]
    if event.kind == "idle":
        box = {"ph": "X", "tid": _IDLE, "dur": duration, "name": awaited, "cat": "idle"}
        return [base | box | {"args": {"step": event.step}}]
    if event.kind == "wait":
        # Waits overlap, hence asynchronous.
        shared = {"name": f"{label} waits for {awaited}", "cat": "wait", "id": identifier}
        end = {"pid": rank.rank, "ts": _us(event.end_ns, origin_ns)}
        return [
            base | shared | {"ph": "b", "tid": EXECUTED, "args": args},
            end | shared | {"ph": "e", "tid": EXECUTED},
        ]
    return []


def _lane_names(rank: RankRecording) -> list[tuple[int, str]]:
    return list(enumerate((t.name for t in lane_tracks(rank)), start=len(_THREADS)))


def _lanes(rank: RankRecording, origin_ns: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": rank.rank,
            "tid": tid,
            "ts": _us(copy.begin_ns, origin_ns),
            "dur": copy.duration_ns / 1e3,
            "name": f"{copy.num_bytes} bytes, {copy.what}",
            "cat": "lane",
            "args": {
                "bytes": copy.num_bytes,
                "lane": copy.what,
                "source": rank.rank if copy.kind == "lane sent" else copy.peer,
                "target": copy.peer if copy.kind == "lane sent" else rank.rank,
                "uncertainty_us": copy.uncertainty_ns / 1e3,
            },
        }
        for tid, track in enumerate(lane_tracks(rank), start=len(_THREADS))
        for copy in track.copies
    ]


def _planned(document: Document) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": step.replica[action.pp_rank],
            "tid": _PLANNED,
            "ts": _us(step.first_ns + action.begin_ns, document.begin_ns),
            "dur": round((action.end_ns - action.begin_ns) / 1e3, 3),
            "name": f"{PHASES[action.phase]}{action.mb}",
            "cat": "planned",
            "args": {"step": step.number, "microbatch": action.mb},
        }
        for step in document.steps
        for action in step.plan.actions
    ]


def _transfers(document: Document) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for number, t in enumerate(document.transfers):
        name = f"{t.what} ({t.num_bytes} bytes, microbatch {t.mb})"
        args = {"bytes": t.num_bytes, "microbatch": t.mb, "step": t.step, "what": t.what}
        sent = {"pid": t.source, "tid": _SENT, "ts": _us(t.sent_ns, document.begin_ns)}
        received = {"pid": t.target, "tid": _RECEIVED}
        received["ts"] = _us(t.received_ns, document.begin_ns)  # type: ignore[assignment]
        box = {"ph": "X", "dur": _ARROW_END_US, "name": name, "cat": "tensor", "args": args}
        arrow = {"name": "tensor", "cat": "tensor", "id": number}
        events += [sent | box, received | box]
        events += [sent | arrow | {"ph": "s", "args": args}]
        events += [received | arrow | {"ph": "f", "bp": "e"}]
    return events
