"""Events of a job for orchestrators: the fields of their lines (docs/orchestrators.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """A line of the event file; the fields of a subclass are those of the line."""

    NAME: ClassVar[str]


@dataclass(frozen=True)
class Started(Event):
    """`smp.init` has connected all ranks."""

    NAME: ClassVar[str] = "started"
    ranks: int
    layout: Mapping[str, Any]
    manifest: str | None


@dataclass(frozen=True)
class Partitioned(Event):
    """The parameters of a model are where they stay."""

    NAME: ClassVar[str] = "partitioned"
    model: int


@dataclass(frozen=True)
class FirstStep(Event):
    """The first training step has ended, of the job (``started``) or of ranks that go on."""

    NAME: ClassVar[str] = "first_step"
    after: str
    seconds: float


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint is complete in its folder."""

    NAME: ClassVar[str] = "checkpoint"
    path: str
    tag: str
    step: int
    bytes: int
    seconds: float
    store: str | None


@dataclass(frozen=True)
class Stored(Event):
    """A checkpoint is complete in its store."""

    NAME: ClassVar[str] = "stored"
    store: str
    name: str
    seconds: float


@dataclass(frozen=True)
class Failed(Event):
    """A rank has failed, as the writing rank has noticed."""

    NAME: ClassVar[str] = "failure"
    rank: int | None
    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class Resized(Event):
    """Ranks were lost, and the others go on."""

    NAME: ClassVar[str] = "resized"
    lost: Sequence[int]
    ranks: Sequence[int]
    layout_before: Mapping[str, Any]
    layout: Mapping[str, Any]
    seconds: Mapping[str, float]
    reason: str


@dataclass(frozen=True)
class Ended(Event):
    """The job has ended; ``smp run`` writes it in place of the ranks that it has started."""

    NAME: ClassVar[str] = "ended"
    status: str
    exit_status: int | None = None
    rank: int | None = None
    text: str = ""
    restarts: bool = False


EVENTS = (Started, Partitioned, FirstStep, Checkpoint, Stored, Failed, Resized, Ended)
