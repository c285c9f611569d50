"""Relays the output of ranks line by line, with the rank in front, and writes log files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_MAX_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16


Write = Callable[[list[bytes]], None]
"""Function that takes whole lines, without their ends."""


@dataclass
class Writers:
    """The destinations of the two streams of a rank."""

    out: Write
    err: Write
    log: IO[Any] | None = None

    def close(self) -> None:
        """Closes the log."""
        if self.log is not None:
            self.log.close()


@dataclass(frozen=True)
class Output:
    """The destinations of the output of all ranks."""

    prefix: bool = True
    """Put the rank in front of each line."""
    folder: Path | None = None
    """Folder for ``rank<r>.log``, or None."""

    @property
    def is_direct(self) -> bool:
        """Returns whether ranks of this machine write to the launcher's streams themselves."""
        return not self.prefix and self.folder is None

    def open(self, rank: int, is_first: bool) -> Writers:
        """Returns the destinations of a rank's lines.

        Args:
            rank: number of the rank.
            is_first: truncate the log file; otherwise continue it.
        """
        log: IO[Any] | None = None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            log = open(self.folder / f"rank{rank}.log", "wb" if is_first else "ab")  # noqa: SIM115
        prefix = f"[{rank}] ".encode() if self.prefix else b""

        def writer(to: IO[Any]) -> Write:
            return lambda lines: _write(lines, prefix, to, log)

        return Writers(writer(sys.stdout.buffer), writer(sys.stderr.buffer), log)


def _write(lines: list[bytes], prefix: bytes, to: IO[Any], log: IO[Any] | None) -> None:
    _write_all(to, b"".join(prefix + line + b"\n" for line in lines))
    if log is not None:
        _write_all(log, b"".join(line + b"\n" for line in lines))


class LineRelay:
    """Relays one stream of a rank, whole lines at a time, so that lines of ranks do not mix."""

    def __init__(self, fd: int, write: Write) -> None:
        """
        Args:
            fd: descriptor to read from; closed by `close`.
            write: function that takes the lines.
        """
        os.set_blocking(fd, False)
        self.fd = fd
        self._write = write
        self._rest = b""

    def pump(self) -> bool:
        """Relays the available output; returns False at the end of the stream."""
        while True:
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._take(data)

    def _take(self, data: bytes) -> None:
        # A progress bar ends its lines with a carriage return.
        lines = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write(lines)

    def close(self) -> None:
        """Relays the remaining output, and closes the stream."""
        self.pump()
        if self._rest:
            self._write([self._rest])
        os.close(self.fd)


def _write_all(to: IO[Any], data: bytes) -> None:
    try:
        to.write(data)
        to.flush()
    except OSError:
        pass  # the other side no longer reads; the ranks continue


def say(text: str) -> None:
    """Prints a line of the launcher itself."""
    print(f"smp run: {text}", file=sys.stderr, flush=True)


def show(lines: Sequence[str]) -> None:
    """Prints lines that a rank has left for the end."""
    if lines:
        print("\n".join(lines), file=sys.stderr, flush=True)
