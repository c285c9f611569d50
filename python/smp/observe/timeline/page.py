"""The page that shows a trace: one file, nothing comes from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smp.observe.timeline.document import Document, StepSpan, lane_tracks
from smp.observe.timeline.events import RankRecording

_FOLDER = Path(__file__).resolve().parent / "page_parts"


def to_page(document: Document) -> str:
    """The HTML text."""
    # "<" could end the script element; JSON has another way to write it.
    data = json.dumps(to_data(document), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "/*STYLE*/": _part("timeline.css"),
        "/*DATA*/": data.replace("<", "\\u003c"),
        "/*SCRIPT*/": _part("timeline_view.js") + _part("timeline.js"),
    }
    page, rest = "", _part("timeline.html")
    for mark, text in parts.items():  # in the order of the file: what is put in is not searched
        before, rest = rest.split(mark)
        page += before + text
    return page + rest


def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


class _Words:
    """Numbers for texts that are there many times."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))


def to_data(document: Document) -> dict[str, Any]:
    """What the script of the page reads; times in microseconds from the begin of the trace."""
    words = _Words()
    origin = document.begin_ns
    replicas = list(dict.fromkeys(r.replica for r in document.ranks))
    row_of = {r.rank: index for index, r in enumerate(document.ranks)}
    rows = [
        _row(document, rank, replicas.index(rank.replica), origin, words) for rank in document.ranks
    ]
    return {
        "policy": document.ranks[0].policy,
        "end": _us(document.end_ns, origin),
        "replicas": len(replicas),
        "steps": [_step(step, replicas.index(step.replica), origin) for step in document.steps],
        "rows": rows,
        "transfers": [
            [
                row_of[t.source],
                row_of[t.target],
                _us(t.sent_ns, origin),
                _us(t.received_ns, origin),
                t.num_bytes,
                t.mb,
                words(t.what),
            ]
            for t in document.transfers
        ],
        "words": list(words.texts),
        "notes": list(document.notes),
    }


def _us(time_ns: float, origin_ns: float = 0) -> float:
    return round((time_ns - origin_ns) / 1e3, 1)


def _step(step: StepSpan, replica: int, origin_ns: int) -> dict[str, Any]:
    return {
        "number": step.number,
        "replica": replica,
        "begin": _us(step.begin_ns, origin_ns),
        "end": _us(step.end_ns, origin_ns),
        "microbatches": step.num_microbatches,
        "makespan": _us(step.makespan_ns),
        "planned": _us(step.plan.makespan_ns) if step.plan.bubble is not None else None,
    }


def _row(
    document: Document, rank: RankRecording, replica: int, origin_ns: int, words: _Words
) -> dict[str, Any]:
    steps = [step for step in document.steps if rank.rank in step.busy_ns]

    def begin(event: Any) -> list[float]:
        return [_us(event.begin_ns, origin_ns), _us(event.duration_ns)]

    def name(event: Any) -> int:
        return words(rank.name_of(event))

    return {
        "rank": rank.rank,
        "pp": rank.pp_rank,
        "replica": replica,
        "place": rank.place,
        "offset": rank.offset_ns / 1e3,
        "uncertainty": rank.uncertainty_ns / 1e3,
        "bubble": round(document.bubble(rank.rank), 6),
        "bySteps": [
            {
                "number": step.number,
                "busy": _us(step.busy_ns[rank.rank]),
                "bubble": round(step.bubble(rank.rank), 6),
                "planned": step.planned_bubble(rank.rank),
            }
            for step in steps
        ],
        # Each by its begin: the script searches in them.
        "runs": sorted(
            [*begin(e), e.phase, e.mb, name(e), words(e.task), e.step] for e in rank.of_kind("run")
        ),
        "device": sorted(
            [*begin(e), e.phase, e.mb, name(e), words(e.task), e.step]
            for e in rank.of_kind("device")
        ),
        "copies": [
            [
                [*begin(e), words(e.what), e.peer, e.num_bytes, int(e.kind == "lane sent")]
                for e in track.copies
            ]
            for track in lane_tracks(rank)
        ],
        "waits": sorted(
            [*begin(e), e.phase, e.mb, name(e), words(e.what), e.peer] for e in rank.of_kind("wait")
        ),
        "idles": sorted(
            [*begin(e), words(e.what), e.peer, words(e.task if e.mb >= 0 else "")]
            for e in rank.of_kind("idle")
        ),
        "plan": sorted(
            [
                _us(step.first_ns + a.begin_ns, origin_ns),
                _us(a.end_ns - a.begin_ns),
                a.phase,
                a.mb,
            ]
            for step in steps
            for a in step.plan.actions
            if step.replica[a.pp_rank] == rank.rank
        ),
    }
