"""Starts the ranks of a job, relays signals, ends all when one fails, starts them again.

The failure file follows torchrun's error file. A rank that ends because of another one writes so,
hence the status of the culprit is reported, whichever rank ends first.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from smp_cli.environment import (
    failure_file,
    given_up_file,
    read_notes,
    stoppable_file,
    taken_file,
)
from smp_cli.events import JobEvents
from smp_cli.output import say
from smp_cli.ranks import Ranks
from smp_cli.remote import HostError

EXIT_RESUME = 75
"""Status of a rank that saved its state and wants to be started again (EX_TEMPFAIL of sysexits.h).
`smp.preemption` defines the same number."""

EXIT_NOT_STARTED = 1
"""Status of the command if nothing was started."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.2


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


@dataclass(frozen=True)
class Limits:
    """Limits to starting a job again, in whole or in part, and to the time in which it ends."""

    max_restarts: int
    """Failures after which all ranks are started again."""
    max_replacements: int
    """Processes that wait, started for ended ones while the others go on, in each start."""
    makes_room: bool
    """Whether ranks that have taken places on hosts that are full are to be fewer."""
    grace_s: float
    """Seconds in which the other ranks can end by themselves after a failure."""


def run_job(make: Callable[[Path], Ranks], limits: Limits, events: JobEvents) -> int:
    """Runs a job to its end.

    Args:
        make: function that returns the ranks of one start; their folder for it is the argument.
        limits: see there.
        events: event file of the job.

    Returns:
        0, or the exit status of the rank that failed first.
    """
    with _Signals() as signals:
        num_failures = restart_count = 0
        while True:
            with tempfile.TemporaryDirectory(
                prefix="smp-run-", ignore_cleanup_errors=True
            ) as folder:
                ranks = make(Path(folder))
                try:
                    ranks.start(restart_count)
                    _watch(ranks, limits, signals, Path(folder))
                except HostError as error:
                    say(f"{error}; nothing is started")
                    events.ended(restart_count, "failed", EXIT_NOT_STARTED, text=str(error))
                    return EXIT_NOT_STARTED
                finally:
                    ranks.end()
                taken = read_taken(Path(folder))
                idle = set(ranks.spares) - set(taken)
                ended = [(rank, status) for rank, status in ranks.ended if rank not in idle]
                failure = find_failure(ended, Path(folder))
                given_up = read_given_up(Path(folder))
            if failure is None:
                if given_up:
                    by = f"; {taken} have taken places" if taken else ""
                    say(f"the job has finished without the ranks {given_up}, which it has lost{by}")
                events.ended(restart_count, "finished", 0)
                return 0
            is_preempted = failure.status == EXIT_RESUME
            if is_preempted:
                say("the ranks saved their state and want to be resumed (status 75)")
            else:
                say(failure.words, *failure.report)
                num_failures += 1
            max_restarts = limits.max_restarts
            is_over = signals.is_ending or num_failures > max_restarts or not max_restarts
            events.ended(
                restart_count,
                "preempted" if is_preempted else "failed",
                failure.exit_status,
                rank=failure.rank,
                text=failure.words,
                restarts=not is_over,
            )
            if is_over:
                return failure.exit_status
            restart_count += 1
            say(f"starting all ranks again ({num_failures} of {max_restarts} failures)")


def _watch(ranks: Ranks, limits: Limits, signals: _Signals, folder: Path) -> None:
    """Waits until all ranks have ended; after a failure, ends the ranks that are left.

    Ranks that go on after a failure note so in the folder, and end by themselves if they cannot.
    """
    num_told, told_idle = 0, set[int]()
    replacements = _Replacements(ranks, limits.max_replacements, folder)
    room = _Room(ranks, folder)
    steps = [signal.SIGTERM, signal.SIGKILL]  # for ranks that do not end by themselves
    deadline = float("inf")
    while True:
        idle = set(ranks.spares) - set(read_taken(folder))
        if not set(ranks.running) - idle:
            return  # processes that wait are ended with the rest
        ranks.wait(_POLL_S)
        for number in signals.take():
            ranks.send(number)
            if signals.num_interrupts > 1:
                ranks.send(signal.SIGKILL)
        idle = set(ranks.spares) - set(read_taken(folder))
        for rank, status in ranks.ended:
            if status and rank in idle - told_idle and not signals.is_ending:
                told_idle.add(rank)
                _say_waited(rank, status, folder)
        has_failed = any(
            status not in (0, EXIT_RESUME) and rank not in idle for rank, status in ranks.ended
        )
        if has_failed and given_up_file(folder).exists():
            for rank, status in ranks.ended[num_told:]:
                if status not in (0, EXIT_RESUME) and ranks.running and rank not in idle:
                    say(f"{Failure(rank, status).words}; the ranks {ranks.running} may go on")
            num_told = len(ranks.ended)
        elif has_failed and deadline == float("inf"):
            deadline = time.monotonic() + limits.grace_s
        if not signals.is_ending:
            replacements.start()
            if limits.makes_room and ranks.are_crowded(idle):
                room.make()
        if time.monotonic() > deadline and steps:
            say(f"ending the ranks {ranks.running}, which still run, with {steps[0].name}")
            ranks.send(steps.pop(0))
            deadline = time.monotonic() + limits.grace_s


class _Replacements:
    """Starts processes that wait, in place of ended ones.

    Args:
        ranks: all processes of the job.
        most: number of processes that may be started.
        folder: folder with the notes of ranks that go on.
    """

    def __init__(self, ranks: Ranks, most: int, folder: Path) -> None:
        self._ranks, self._most, self._folder = ranks, most, folder
        self._replaced = set[int]()

    def start(self) -> None:
        """Starts a process for each that has ended too early, if the others go on."""
        if len(self._replaced) >= self._most or not given_up_file(self._folder).exists():
            return
        given_up = read_given_up(self._folder)
        idle = set(self._ranks.spares) - set(read_taken(self._folder))
        for number, status in list(self._ranks.ended):
            # A rank with status 0 has finished, or was dismissed, as the others note afterwards.
            is_early = status not in (0, EXIT_RESUME) or number in idle or number in given_up
            if is_early and number not in self._replaced and len(self._replaced) < self._most:
                self._replaced.add(number)
                own = self._ranks.start_spare(number)
                count = f"{len(self._replaced)} of {self._most}"
                say(f"process {own} is started in place of {number}, and waits ({count})")


class _Room:
    """Asks ranks that have become too many for their hosts to save and to stop, once.

    Args:
        ranks: all processes of the job.
        folder: folder with the notes of ranks that can be asked.
    """

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._has_told = self._has_asked = False

    def make(self) -> None:
        """Asks, if a rank can be asked by now; says so if none can yet."""
        noted = read_notes(stoppable_file(self._folder)) or ()
        stoppable = set(noted).intersection(self._ranks.running)
        if stoppable and not self._has_asked:
            self._has_asked = True
            say("hosts are lost: the ranks are asked to save, and fewer will go on")
            self._ranks.stop(min(stoppable))
        elif not stoppable and not self._has_told:
            self._has_told = True
            say(
                "hosts are lost, and others have more ranks than before; these become fewer when "
                "they have called smp.preemption_requested, which they have not yet"
            )


def _say_waited(rank: int, status: int, folder: Path) -> None:
    told = _read_failure(failure_file(folder, rank))
    failure = Failure(rank, status, () if told is None else told.report)
    say(f"{failure.words}, which has waited for the place of another", *failure.report)


def find_failure(ended: Sequence[tuple[int, int]], folder: Path) -> Failure | None:
    """Returns the failure of the culprit: the rank that others name, or the first that ended.

    A rank that has left with status 0 is named beside the first rank that failed because of it.
    Ranks without which the others went on have not failed.

    Args:
        ended: rank and status, in the order in which they ended.
        folder: folder with the files of ranks that failed.
    """
    given_up = read_given_up(folder)
    failed = {rank: status for rank, status in ended if status != 0 and rank not in given_up}
    if not failed:
        return None
    told = {rank: one for rank in failed if (one := _read_failure(failure_file(folder, rank)))}
    victims = [rank for rank, one in told.items() if one.is_victim]
    named = [told[rank].culprit for rank in victims if told[rank].culprit not in (None, rank)]
    raised = [rank for rank, one in told.items() if one.culprit == rank and not one.is_victim]
    silent = [rank for rank in failed if rank not in told and failed[rank] != EXIT_RESUME]
    culprit = next(r for r in (*named, *raised, *silent, *failed) if r is not None and r in failed)
    left = None
    if culprit in victims:
        # If all wait for each other, no rank is named.
        gone = [rank for rank, status in ended if status == 0]
        left = next((rank for rank in named or gone if rank in gone), None)
    # The culprit's own report is the best, then that of a rank that names it.
    order = sorted(told, key=lambda rank: (rank != culprit, told[rank].culprit != culprit))
    report = next((told[rank].report for rank in order if told[rank].report), ())
    return Failure(culprit, failed[culprit], report, left)


def read_given_up(folder: Path) -> list[int]:
    """Returns the ranks without which the others went on."""
    return read_notes(given_up_file(folder)) or []  # no file: the job ends when a rank fails


def read_taken(folder: Path) -> list[int]:
    """Returns the processes that have the places of lost ranks."""
    return read_notes(taken_file(folder)) or []


class _Told(NamedTuple):
    """The content of a rank's failure file."""

    culprit: int | None
    is_victim: bool
    """Whether it failed because of another rank, which may be unknown (it may just have left)."""
    report: tuple[str, ...]


def _read_failure(path: Path) -> _Told | None:
    try:
        told = json.loads(path.read_text())
        report = tuple(map(str, told.get("report", ())))
        return _Told(told["culprit"], told["error"] == "PeerFailure", report)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Signals:
    """Notes signals while the context is open."""

    def __init__(self) -> None:
        self._noted: list[signal.Signals] = []
        self.is_ending = False
        """Whether a signal asked for the end of the job; it is not started again."""
        self.num_interrupts = 0

    def __enter__(self) -> _Signals:
        self._previous = {number: signal.signal(number, self._note) for number in _FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))
        self.is_ending |= number in _ENDING
        self.num_interrupts += number == signal.SIGINT

    def take(self) -> list[signal.Signals]:
        """Takes the signals since the last call."""
        taken, self._noted = self._noted, []
        return taken
