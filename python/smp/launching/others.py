"""Runs the ranks from 1 on as processes, beside a process that is rank 0 itself."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from smp_cli.environment import Share
from smp_cli.ranks import LocalRanks

_POLL_S = 0.1
_GRACE_S = 5.0  # for ranks to end by themselves after another one has failed


class Others(LocalRanks):
    """Runs all ranks of a job but the first, which is the process of the caller.

    A thread relays their output and watches them until `finish`. Processes are started in the
    thread of the caller, because the kernel ends them with the thread that started them.
    """

    def __init__(self, share: Share, meeting: Path, on_failure: Callable[[], None]) -> None:
        """
        Args:
            share: all ranks of the job.
            meeting: folder in which ranks report why they failed.
            on_failure: called once in the thread that watches, if a rank has failed and the job
                has not ended some seconds later.
        """
        super().__init__(share, _print, meeting)
        self._on_failure = on_failure
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._run, name="smp.launch", daemon=True)

    def start(self, restart_count: int) -> None:
        for rank in self._share.ranks[1:]:
            self.start_rank(rank, restart_count)
        self._watch.start()

    @property
    def has_failed(self) -> bool:
        """Returns whether a rank has ended with an error."""
        return any(status for _, status in self.ended)

    def finish(self, limit_s: float | None) -> None:
        """Waits for the ends of all ranks, and frees everything.

        Args:
            limit_s: seconds until ranks that still run are ended; None: they are waited for,
                unless one fails.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while self.running and (deadline is None or time.monotonic() < deadline):
                if deadline is None and self.has_failed:
                    deadline = time.monotonic() + _GRACE_S
                time.sleep(_POLL_S)
        finally:
            self._is_over.set()
            self._watch.join()
            self.end()

    def _run(self) -> None:
        deadline = None
        while not self._is_over.is_set():
            self.wait(_POLL_S)
            if deadline is None and self.has_failed:
                deadline = time.monotonic() + _GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                deadline = float("inf")
                self._on_failure()


def _print(rank: int, stream: str, lines: Sequence[bytes]) -> None:
    """Writes lines of a rank to the streams of this process, which a notebook shows in its cell."""
    to = sys.stdout if stream == "out" else sys.stderr
    text = "".join(f"[{rank}] {line.decode(errors='replace')}\n" for line in lines)
    # Below the text, in which a line of `print` in another thread may have no end yet. To flush
    # the text would send the beginning of that line.
    below = getattr(to, "buffer", None)
    if below is None:
        to.write(text)
        to.flush()
    else:
        below.write(text.encode(errors="replace"))
        below.flush()


@contextmanager
def whole_lines() -> Iterator[None]:
    """Keeps lines of `print` whole beside those of other ranks with ``python -u`` as well.

    There a line and its end are written one after the other, and what another thread writes may
    come between.
    """
    streams = [
        stream
        for stream in (sys.stdout, sys.stderr)
        if isinstance(stream, TextIOWrapper) and stream.write_through
    ]
    before = [stream.line_buffering for stream in streams]
    for stream in streams:
        stream.reconfigure(line_buffering=True, write_through=False)
    try:
        yield
    finally:
        for stream, line_buffering in zip(streams, before, strict=True):
            stream.reconfigure(line_buffering=line_buffering, write_through=True)


_interrupts = threading.Event()  # `interrupt` was called


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets `interrupt` reach the main thread also where Ctrl-C is ignored.

    It is in jobs that a shell has started in the background, as by ``nohup python train.py &``.
    """
    _interrupts.clear()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, _raise_if_ours)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _raise_if_ours(*_: object) -> None:
    if _interrupts.is_set():
        raise KeyboardInterrupt


def interrupt(thread: threading.Thread) -> None:
    """Interrupts a thread as Ctrl-C does, if it is the main one and still runs."""
    if thread is threading.main_thread() and thread.ident is not None:
        _interrupts.set()
        signal.pthread_kill(thread.ident, signal.SIGINT)
