"""Says every half minute how far a session is: `312 of 1503 tests, 4:10, about 8:00 left`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

EVERY_S = 30.0


def progress_line(done: int, total: int, seconds: float) -> str:
    left = seconds / done * (total - done) if done else 0.0
    return f"{done} of {total} tests, {clock(seconds)}, about {clock(left)} left"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """A plugin of the process that reports; workers of pytest-xdist have none."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter
        self._done = self._total = 0
        self._begin = self._shown = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._start(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        self._start(len(ids))

    def pytest_runtest_logfinish(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._shown >= EVERY_S:
            self._shown = now
            line = progress_line(self._done, self._total, now - self._begin)
            self._reporter.ensure_newline()
            self._reporter.write_line(line)

    def _start(self, total: int) -> None:
        if total > self._total:  # the process that only distributes has none of its own
            self._total = total
            self._begin = self._shown = time.monotonic()
