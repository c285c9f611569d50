"""Relays the output of ranks line by line, with the rank in front, and writes log files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_READ_BYTES = 1 << 16

Write = Callable[[int, str, list[bytes]], None]
"""Function that takes a rank, "out" or "err", and whole lines without their ends."""


class Output:
    """Prints the lines of all ranks, and writes their log files."""

    def __init__(self, prefix: bool, folder: Path | None, num_ranks: int) -> None:
        """
        Args:
            prefix: put the rank in front of each line.
            folder: folder for ``rank<r>.log``, or None.
            num_ranks: number of ranks of the job.
        """
        self._prefix, self._folder = prefix, folder
        self._logs: dict[int, IO[Any]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(num_ranks):
                self._open_log(rank, folder)

    def _open_log(self, rank: int, folder: Path) -> None:
        self._logs[rank] = (folder / f"rank{rank}.log").open("wb")

    def write(self, rank: int, stream: str, lines: list[bytes]) -> None:
        """Takes lines of a rank, as `Write` says."""
        prefix = b"[%d] " % rank if self._prefix else b""
        _write(sys.stdout.buffer if stream == "out" else sys.stderr.buffer, prefix, lines)
        if self._folder is not None:
            if rank not in self._logs:  # it was started later
                self._open_log(rank, self._folder)
            _write(self._logs[rank], b"", lines)


def _write(to: IO[Any], prefix: bytes, lines: list[bytes]) -> None:
    try:
        to.write(b"".join(prefix + line + b"\n" for line in lines))
        to.flush()
    except OSError:
        pass  # the other side no longer reads; the ranks continue


class LineRelay:
    """Relays one stream, whole lines at a time, so that lines of ranks do not mix."""

    def __init__(
        self, stream: IO[bytes], write: Callable[[list[bytes]], None], max_line_bytes: int
    ) -> None:
        """
        Args:
            stream: stream to read from; closed by `close`.
            write: function that takes the lines.
            max_line_bytes: length at which a line is relayed although it has no end yet.
        """
        os.set_blocking(stream.fileno(), False)
        self._stream, self._write, self._max_line_bytes = stream, write, max_line_bytes
        self._rest = b""

    def pump(self) -> bool:
        """Relays the available output; returns False at the end of the stream."""
        try:
            while data := os.read(self._stream.fileno(), _READ_BYTES):
                self._take(data)
        except BlockingIOError:
            return True
        return False

    def _take(self, data: bytes) -> None:
        # A progress bar ends its lines with a carriage return.
        lines = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > self._max_line_bytes:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write(lines)

    def close(self) -> None:
        """Relays the remaining output, and closes the stream."""
        self.pump()
        if self._rest:
            self._write([self._rest])
        self._stream.close()


def say(*lines: str) -> None:
    """Prints a line of the launcher itself, and lines that a rank has left for the end."""
    print("smp run: " + "\n".join(lines), file=sys.stderr, flush=True)
