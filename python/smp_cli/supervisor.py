"""Starts the ranks of a job, relays signals, ends all when one fails, starts them again.

The failure file follows torchrun's error file. A rank that ends because of another one writes so,
hence the status of the culprit is reported, whichever rank ends first.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from smp_cli.output import Output, say, show
from smp_cli.ranks import Ranks
from smp_cli.remote import HostError, RemoteJob, RemoteRanks

EXIT_RESUME = 75
"""Status of a rank that saved its state and wants to be started again (EX_TEMPFAIL of sysexits.h).
`smp.preemption` defines the same number."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.2


@dataclass(frozen=True)
class Attempt:
    """A start of all ranks."""

    index: int
    folder: Path
    """Temporary folder in which the ranks meet."""
    port: int
    """A free TCP port."""

    def failure_file(self, rank: int) -> Path:
        """Returns the file to which a rank writes why it failed."""
        return self.folder / f"failure{rank}.json"


class Running(Protocol):
    """The ranks of one attempt: `Ranks` or `RemoteRanks`."""

    ended: list[tuple[int, int]]

    @property
    def running(self) -> list[int]: ...

    def wait(self, timeout_s: float) -> None: ...

    def send(self, number: signal.Signals) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """A job with its limits."""

    start: Callable[[Attempt], Running]
    """Function that starts all ranks."""
    max_restarts: int = 0
    grace_s: float = 10.0


def start_here(
    command: list[str],
    num_ranks: int,
    environment: Callable[[int, Attempt], dict[str, str]],
    output: Output,
) -> Callable[[Attempt], Running]:
    """Returns a function that starts all ranks on this machine.

    Args:
        command: command of a rank.
        num_ranks: number of ranks of the job.
        environment: function that returns the environment of a rank by its number and the attempt.
        output: destination of the ranks' output.
    """

    def start(attempt: Attempt) -> Running:
        ranks = Ranks(output, is_first=attempt.index == 0)
        try:
            for rank in range(num_ranks):
                ranks.start(command, environment(rank, attempt))
        except BaseException:
            _end(ranks)
            raise
        return ranks

    return start


def start_on_hosts(job: RemoteJob, output: Output) -> Callable[[Attempt], Running]:
    """Returns a function that starts all ranks on several hosts; it may raise `HostError`."""

    def start(attempt: Attempt) -> Running:
        ranks = RemoteRanks(job, output, attempt.index == 0, attempt.folder)
        try:
            ranks.start(attempt.index)
        except BaseException:
            _end(ranks)
            raise
        return ranks

    return start


def _end(ranks: Running) -> None:
    ranks.kill()
    ranks.close()


@dataclass(frozen=True)
class Failure:
    """The failure of the rank that ended the job."""

    rank: int
    status: int
    """Status as in `subprocess`: negative for signals."""
    report: tuple[str, ...] = ()
    """Report of a rank: a short traceback, the failed rank and its place, and a remedy."""
    left: int | None = None
    """Rank that ended with status 0 while others needed it, so that `rank` failed; or None."""

    @property
    def exit_status(self) -> int:
        """Returns the exit status that a shell reports."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def words(self) -> str:
        """Returns in words which rank ended the job, and how."""
        how = (
            f"exited with status {self.status}"
            if self.status >= 0
            else f"was killed by {signal.Signals(-self.status).name}"
        )
        left = f"rank {self.left} left (status 0) while other ranks needed it; "
        return ("" if self.left is None else left) + f"rank {self.rank} {how}"


def run_job(job: Job) -> int:
    """Runs a job to its end.

    Returns:
        0, or the exit status of the rank that failed first.
    """
    with _Signals() as signals:
        num_failures = index = 0
        while True:
            try:
                failure = _run_attempt(job, index, signals)
            except HostError as error:
                say(f"{error}; nothing is started")
                return 1
            if failure is None:
                return 0
            wants_resume = failure.status == EXIT_RESUME
            if wants_resume:
                say("the ranks saved their state and want to be resumed (status 75)")
            else:
                say(failure.words)
                show(failure.report)
                num_failures += 1
            if signals.is_ending or num_failures > job.max_restarts or not job.max_restarts:
                return failure.exit_status
            index += 1
            say(f"starting all ranks again ({num_failures} of {job.max_restarts} failures)")


def _run_attempt(job: Job, index: int, signals: _Signals) -> Failure | None:
    folder = Path(tempfile.mkdtemp(prefix="smp-run-"))
    try:
        attempt = Attempt(index, folder, _free_port())
        ranks = job.start(attempt)
        try:
            _watch(job, ranks, signals)
        finally:
            _end(ranks)
        return _find_failure(attempt, ranks.ended)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(job: Job, ranks: Running, signals: _Signals) -> None:
    """Waits until all ranks have ended; after a failure, ends the ranks that are left."""
    steps = [signal.SIGTERM, signal.SIGKILL]  # for ranks that do not end by themselves
    deadline = float("inf")
    while ranks.running:
        ranks.wait(_POLL_S)
        for number in signals.take():
            ranks.send(number)
            if signals.num_interrupts > 1:
                ranks.send(signal.SIGKILL)
        has_failed = any(status not in (0, EXIT_RESUME) for _, status in ranks.ended)
        if has_failed and deadline == float("inf"):
            deadline = time.monotonic() + job.grace_s
        if time.monotonic() > deadline and steps:
            say(f"ending the ranks {ranks.running}, which still run, with {steps[0].name}")
            ranks.send(steps.pop(0))
            deadline = time.monotonic() + job.grace_s


def _find_failure(attempt: Attempt, ended: list[tuple[int, int]]) -> Failure | None:
    """Returns the failure of the culprit: the rank that others name, or the first that ended.

    A rank that has left with status 0 is named beside the first rank that failed because of it.

    Args:
        attempt: attempt with the files of ranks that failed.
        ended: rank and status, in the order in which they ended.
    """
    failed = {rank: status for rank, status in ended if status != 0}
    if not failed:
        return None
    told = {rank: _read_failure(attempt.failure_file(rank)) for rank in failed}
    named = [one.culprit for rank, one in told.items() if one and one.blames_another(rank)]
    raised = [
        rank for rank, one in told.items() if one and one.culprit == rank and not one.is_victim
    ]
    silent = [rank for rank, one in told.items() if not one and failed[rank] != EXIT_RESUME]
    order = [rank for rank in (*named, *raised, *silent, *failed) if rank in failed]
    one = told[order[0]]
    left = None
    if one is not None and one.is_victim:
        # If all wait for each other, no rank is named.
        gone = [rank for rank, status in ended if status == 0]
        left = next((rank for rank in named or gone if rank in gone), None)
    return Failure(order[0], failed[order[0]], _report(order[0], told), left)


def _report(culprit: int, told: Mapping[int, _Told | None]) -> tuple[str, ...]:
    """Returns the report of the culprit, or else of a rank that names it, or of any other rank."""
    there = [one for one in told.values() if one]
    own = [one for one in (told.get(culprit),) if one]
    for one in (*own, *(one for one in there if one.culprit == culprit), *there):
        if one.report:
            return one.report
    return ()


@dataclass(frozen=True)
class _Told:
    """The content of a rank's failure file."""

    culprit: int | None
    is_victim: bool
    """Whether it failed because of another rank, which may be unknown (it may just have left)."""
    report: tuple[str, ...] = ()

    def blames_another(self, rank: int) -> bool:
        return self.is_victim and self.culprit is not None and self.culprit != rank


def _read_failure(path: Path) -> _Told | None:
    try:
        told = json.loads(path.read_text())
        is_victim = told["error"] == "PeerFailure"
        return _Told(told["culprit"], is_victim, tuple(map(str, told.get("report", ()))))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class _Signals:
    """Notes signals while the context is open."""

    def __init__(self) -> None:
        self._noted: list[signal.Signals] = []
        self._previous: dict[signal.Signals, object] = {}
        self.is_ending = False
        """Whether a signal asked for the end of the job; it is not started again."""
        self.num_interrupts = 0

    def __enter__(self) -> _Signals:
        for number in _FORWARDED:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))
        self.is_ending |= number in _ENDING
        self.num_interrupts += number == signal.SIGINT

    def take(self) -> list[signal.Signals]:
        """Takes the signals since the last call."""
        taken, self._noted = self._noted, []
        return taken
