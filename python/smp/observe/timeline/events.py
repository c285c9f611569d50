"""The recording of one rank, as Python values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

PHASES = "FBW"
_STEP_BODY = -1
_OPERATION = -2


class Event(NamedTuple):
    """An event; times are in nanoseconds. See csrc/pipeline/timeline.h for fields by kind."""

    kind: str
    """Words for the kinds of csrc/pipeline/timeline.h, such as "run" or "lane sent"."""
    step: int
    phase: int
    mb: int
    module_id: int
    visit: int
    resume: int
    what: str
    peer: int
    begin_ns: int
    end_ns: int
    ref_rank: int
    ref_id: int
    num_bytes: int
    uncertainty_ns: int = 0

    @property
    def task(self) -> str:
        """Returns the text of `smp.metrics.executed_order`."""
        module = "" if self.module_id == _STEP_BODY else f":m{self.module_id}"
        visit = f".{self.visit}" if self.visit else ""
        resume = f"/{self.resume}" if self.resume else ""
        return f"{PHASES[self.phase]}{self.mb}{module}{visit}{resume}"

    @property
    def is_body(self) -> bool:
        """Returns whether the user's step function ran, not a module for another rank."""
        return self.module_id == _STEP_BODY

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class RankRecording:
    """The recording that one rank sends to rank 0.

    Attributes:
        rank: global rank.
        pp_rank: pipeline rank.
        replica: global ranks of its pipeline group.
        place: words for its place in the grid.
        machine: identifier that is equal for ranks that share a clock.
        module_names: names by module id; empty without a server.
        policy, active_microbatches: schedule of its tasks.
        events: events in the order of recording; on the clock of this rank until `aligned`.
        num_dropped: number of older events that found no room.
        offset_ns: time on this rank's clock when that of rank 0 shows 0.
        uncertainty_ns: largest error of the offset, in both directions.
    """

    rank: int
    pp_rank: int
    replica: tuple[int, ...]
    place: str
    machine: str
    module_names: tuple[str, ...]
    policy: str
    active_microbatches: int | None
    events: tuple[Event, ...]
    num_dropped: int = 0
    offset_ns: int = 0
    uncertainty_ns: int = 0

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def tasks(self) -> list[Event]:
        """Returns tasks with times of the device if they were recorded, else of the host."""
        return self.of_kind("device") or self.of_kind("run")

    def name_of(self, event: Event) -> str:
        """Returns the module of a task, or words for a task without one."""
        if event.is_body:
            return "step function"
        if event.module_id == _OPERATION:
            return "tensor arithmetic"
        if event.module_id >= len(self.module_names):
            return f"module {event.module_id}"
        return self.module_names[event.module_id] or "(root)"

    def aligned(self, offset_ns: int, uncertainty_ns: int) -> RankRecording:
        """Returns the recording on the clock of rank 0."""
        moved = tuple(
            event._replace(begin_ns=event.begin_ns - offset_ns, end_ns=event.end_ns - offset_ns)
            for event in self.events
        )
        return replace(self, events=moved, offset_ns=offset_ns, uncertainty_ns=uncertainty_ns)


def to_events(rows: list[tuple[Any, ...]], num_passes: int = 0) -> tuple[Event, ...]:
    """Converts events of the C++ recorder.

    Args:
        rows: rows of the recorder.
        num_passes: number of earlier steps that are not the script's.
    """
    events = (Event(*row) for row in rows)
    return tuple(e._replace(step=e.step - num_passes) if e.step >= 0 else e for e in events)
