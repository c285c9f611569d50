"""Runs the processes of one attempt, and relays their output."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
from collections.abc import Callable

from smp_cli.output import LineRelay, Output, Writers

_PR_SET_PDEATHSIG = 1


class Ranks:
    """Processes, each in its own session, so that their child processes can be ended with them."""

    def __init__(self, output: Output, is_first: bool) -> None:
        """
        Args:
            output: destination of the ranks' output.
            is_first: log files are truncated; otherwise they are continued.
        """
        self._output = output
        self._is_first = is_first
        self._processes: list[subprocess.Popen[bytes]] = []
        self._relays: dict[int, LineRelay] = {}
        self._writers: list[Writers] = []
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self.ended: list[tuple[int, int]] = []
        """Rank and status of ended processes, in the order of their ends."""

    @property
    def running(self) -> list[int]:
        """Returns the ranks that have not ended."""
        return sorted(self._pidfds.values())

    def start(self, command: list[str], env: dict[str, str]) -> None:
        """Starts the next rank."""
        rank = len(self._processes)
        piped = None if self._output.is_direct else subprocess.PIPE
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=piped,
            stderr=piped,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._processes.append(process)
        pidfd = os.pidfd_open(process.pid)
        self._pidfds[pidfd] = rank
        self._selector.register(pidfd, selectors.EVENT_READ)
        if piped is not None:
            self._relay(process, self._output.open(rank, self._is_first))

    def _relay(self, process: subprocess.Popen[bytes], writers: Writers) -> None:
        self._writers.append(writers)
        for stream, write in ((process.stdout, writers.out), (process.stderr, writers.err)):
            assert stream is not None
            relay = LineRelay(os.dup(stream.fileno()), write)
            stream.close()
            self._relays[relay.fd] = relay
            self._selector.register(relay.fd, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> None:
        """Relays output and notes ends; returns after the first event or the timeout."""
        for key, _ in self._selector.select(timeout_s):
            assert isinstance(key.fd, int)
            if key.fd in self._pidfds:
                self._note_end(key.fd)
            elif not self._relays[key.fd].pump():
                self._end_relay(key.fd)

    def _note_end(self, pidfd: int) -> None:
        rank = self._pidfds.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self.ended.append((rank, self._processes[rank].wait()))

    def _end_relay(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._relays.pop(fd).close()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the running ranks; SIGKILL also to their child processes."""
        for rank in self.running:
            process = self._processes[rank]
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    def kill(self) -> None:
        """Ends the ranks, and all processes that are left in their sessions."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        while self._pidfds:
            self.wait(1.0)

    def close(self) -> None:
        """Relays the last output and frees everything."""
        for fd in list(self._relays):
            self._end_relay(fd)
        for writers in self._writers:
            writers.close()
        self._selector.close()


def die_with_parent(parent: int) -> Callable[[], None]:
    """Returns a function for the child: the kernel then ends it when the launcher is killed."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the launcher was killed before the call

    return prepare
