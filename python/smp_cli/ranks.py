"""Runs the processes of one start of a job, and relays their output."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from smp_cli.environment import Share
from smp_cli.output import LineRelay, Write

_PR_SET_PDEATHSIG = 1
_Lines = Callable[[list[bytes]], None]


class Ranks(ABC):
    """The ranks of a job from their start to their end, however they are started."""

    _max_line_bytes = 1 << 16
    """Length at which a line is relayed although it has no end yet."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []
        """Rank and status of ended ranks, in the order of their ends."""
        self.spares = range(0)
        """Numbers of processes that wait for the places of ranks."""
        self._running: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._relays: list[LineRelay] = []

    @property
    def running(self) -> list[int]:
        """Returns the ranks that have not ended."""
        return sorted(self._running)

    @abstractmethod
    def start(self, restart_count: int) -> None:
        """Starts all ranks; `restart_count` is the number of earlier starts."""

    @abstractmethod
    def start_spare(self, replaced: int) -> int:
        """Starts one more process that waits, in place of an ended one; returns its number."""

    def wait(self, timeout_s: float) -> None:
        """Relays output and notes ends; returns after the first event or the timeout."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the running ranks; SIGKILL also to their child processes."""

    @abstractmethod
    def stop(self, rank: int) -> None:
        """Sends SIGTERM to one rank, upon which all save and stop."""

    def are_crowded(self, idle: Set[int]) -> bool:
        """Returns whether a host has more ranks than it was to have, as others are lost.

        Args:
            idle: processes that wait.
        """
        return False

    def end(self) -> None:
        """Ends all ranks and their child processes, relays the last output, frees everything."""
        for relay in self._relays:
            relay.close()
        self._selector.close()

    def relay(
        self, stream: IO[bytes], write: _Lines, on_close: Callable[[], object] = lambda: None
    ) -> LineRelay:
        """Relays the lines of a stream while `wait` waits."""
        relay = LineRelay(stream, write, self._max_line_bytes)
        self._relays.append(relay)

        def pump() -> None:
            if not relay.pump():
                self._selector.unregister(stream)
                on_close()

        self._selector.register(stream, selectors.EVENT_READ, pump)
        return relay

    def _launch(
        self,
        command: list[str],
        on_end: Callable[[int], None],
        write: tuple[_Lines, _Lines] | None,
        stdin: int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a process in its own session, so that its child processes can be ended with it.

        Args:
            command: command with its arguments.
            on_end: function that `wait` calls with the status, after the process's last lines.
            write: functions that take lines of both streams; None: they are the launcher's.
            stdin: standard input, as for `subprocess`.
            env: environment; None: that of the launcher.
        """
        piped = None if write is None else subprocess.PIPE
        process = subprocess.Popen(
            command,
            env=env,
            stdin=stdin,
            stdout=piped,
            stderr=piped,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        streams = zip((process.stdout, process.stderr), write or (), strict=False)
        relays = [self.relay(stream, take) for stream, take in streams if stream]
        pidfd = os.pidfd_open(process.pid)

        def end() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            for relay in relays:
                relay.pump()
            on_end(process.wait())

        self._selector.register(pidfd, selectors.EVENT_READ, end)
        return process

    def _note_end(self, rank: int, status: int) -> None:
        self._running.discard(rank)
        self.ended.append((rank, status))


class LocalRanks(Ranks):
    """Ranks that are processes of this machine."""

    def __init__(self, share: Share, write: Write | None, meeting: Path) -> None:
        """
        Args:
            share: ranks to start.
            write: destination of their output; None: they write to the launcher's streams.
            meeting: folder in which ranks report why they failed.
        """
        super().__init__()
        self._share, self._write, self.meeting = share, write, meeting
        self.spares = share.spares
        self._restart_count = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, restart_count: int) -> None:
        self._restart_count = restart_count
        for rank in self._share.ranks:
            self.start_rank(rank, restart_count)

    def start_spare(self, replaced: int) -> int:
        self.spares = range(self.spares.start, self.spares.stop + 1)
        self.start_rank(self.spares[-1], self._restart_count)
        return self.spares[-1]

    def start_rank(self, rank: int, restart_count: int) -> None:
        """Starts one rank; `restart_count` is the number of earlier starts."""
        write = self._write and (
            partial(self._write, rank, "out"),
            partial(self._write, rank, "err"),
        )
        env = self._share.environment_of(rank, restart_count, self.meeting)
        on_end = partial(self._note_end, rank)
        self._processes[rank] = self._launch(self._share.command, on_end, write, env=env)
        self._running.add(rank)

    def send(self, number: signal.Signals) -> None:
        for rank in self.running:
            if number == signal.SIGKILL:
                os.killpg(self._processes[rank].pid, number)
            else:
                self._processes[rank].send_signal(number)

    def stop(self, rank: int) -> None:
        if rank in self._running:
            self._processes[rank].send_signal(signal.SIGTERM)

    def end(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        while self._running:
            self.wait(1.0)
        super().end()


def die_with_parent(parent: int) -> Callable[[], None]:
    """Returns a function for the child: the kernel then ends it when the launcher is killed."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the launcher was killed before the call

    return prepare
