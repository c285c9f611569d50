"""Rows of a part: an error, a crash, a hang or a broken device ends a row and not its part.

The rows of a part are known before anything is measured. A child process measures one after
another. If it ends, or does not end within the row's limit, the row gets its line, and another
child goes on behind it. A child whose device answers no more, as after a wrong address, ends.
The parent imports no more than torch, and takes no memory of the device.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.gpu import processes
from benchmarks.gpu.figures import Figures

#: Seconds without which no child is started.
LEAST_S = 5.0


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
        measure: adds the figures; an error becomes a line.
        needed_s: seconds without which the row is skipped.
        limit_s: seconds after which its process is killed.
        process: rows with equal names share a process.
    """

    name: str
    measure: Callable[[Figures], None]
    needed_s: float = 5.0
    limit_s: float = 120.0
    process: str = ""


@dataclass(frozen=True)
class Contents:
    """Lines of a child's table before it measures: its parent imports none of the modules.

    Attributes:
        device: name of the device.
        rows: names of all rows of the part, and seconds after which each is killed.
    """

    device: str
    rows: list[tuple[str, float]]


def run_rows(figures: Figures, rows: Sequence[Row], begin: int, reports: Connection) -> None:
    """Measures rows in a child, until one belongs to another process or the device is broken.

    Args:
        begin: index of the child's first row.
        reports: gets the contents, then each index before its row and None after it.
    """
    reports.send(Contents(figures.device.name, [(row.name, row.limit_s) for row in rows]))
    for index in range(begin, len(rows)):
        row = rows[index]
        if row.process != rows[begin].process:
            return
        reports.send(index)
        if figures.has_time(row.name, row.needed_s):
            with figures.measuring(row.name):
                row.measure(figures)
        reports.send(None)
        if not figures.device.answers():
            return


class Supervisor:
    """Runs the rows of a part in children.

    Args:
        figures: figures of the parent; gets the lines of rows that could not write their own.
        command: returns the command of a child for the index of its first row and a descriptor of
            its reports.
        clean: ends what a child has left behind.
    """

    def __init__(
        self,
        figures: Figures,
        command: Callable[[int, int], list[str]],
        clean: Callable[[], None] = lambda: None,
    ) -> None:
        self._figures, self._command, self._clean = figures, command, clean
        self._rows: list[tuple[str, float]] = []

    def run(self) -> None:
        """Gives every row a line."""
        begin = self._run_child(0)
        while begin < len(self._rows):
            if self._figures.left_s() < LEAST_S:
                self._figures.skip(self._name(begin), "no time was left")
                begin += 1
            else:
                begin = self._run_child(begin)

    def _name(self, index: int) -> str:
        """Returns the name of a row; that of the part while no child has said its rows."""
        return self._rows[index][0] if self._rows else self._figures.part

    def _run_child(self, begin: int) -> int:
        """Runs a child; returns the index of the first row without a line."""
        reading, writing = os.pipe()
        process = subprocess.Popen(
            self._command(begin, writing), pass_fds=[writing], stdin=subprocess.DEVNULL
        )
        os.close(writing)
        try:
            with Connection(reading, writable=False) as reports:
                return self._watch(process, begin, reports)
        finally:
            processes.end(process)
            self._clean()

    def _watch(self, process: subprocess.Popen[bytes], begin: int, reports: Connection) -> int:
        figures = self._figures
        current, is_over, limit_s = begin, False, figures.left_s()
        while True:
            since = time.monotonic()
            if not reports.poll(max(0.0, min(limit_s, figures.left_s()))):
                if not is_over:
                    waited_s = time.monotonic() - since
                    figures.miss(self._name(current), f"it did not end within {waited_s:.0f} s")
                return current + 1
            try:
                report = reports.recv()
            except EOFError:
                break
            if isinstance(report, Contents):
                figures.name_device(report.device)
                self._rows = report.rows
                continue
            is_over = report is None
            current = current if report is None else report
            limit_s = self._rows[current][1]
        if not is_over:
            figures.fail(self._name(current), _end_of(process))
        return current + 1


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Describes the end of a child that has closed its reports."""
    try:
        return f"its process ended with {processes.words_of(process.wait(LEAST_S))}; see the log"
    except subprocess.TimeoutExpired:
        return "its process closed its reports and did not end; see the log"
