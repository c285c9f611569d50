"""What ranks print: passed on line by line, with the rank in front, and kept in files."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_MAX_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Output:
    """Where the output of ranks goes."""

    prefix: bool = True
    """Put the rank in front of each line."""
    folder: Path | None = None
    """Also write ``rank<r>.log`` there."""


class LineRelay:
    """Passes one stream of a rank on, whole lines at a time, so that lines of ranks do not mix."""

    def __init__(self, fd: int, prefix: bytes, to: IO[Any], log: IO[Any] | None) -> None:
        """
        Args:
            fd: the end to read from; closed by `close`.
            prefix: in front of each line.
            to: where the lines go.
            log: where they go without the prefix.
        """
        os.set_blocking(fd, False)
        self.fd = fd
        self._prefix = prefix
        self._to = to
        self._log = log
        self._rest = b""

    def pump(self) -> bool:
        """Passes on what has come; False at the end of the stream."""
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
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        _write_all(self._to, b"".join(self._prefix + line + b"\n" for line in lines))
        if self._log is not None:
            _write_all(self._log, b"".join(line + b"\n" for line in lines))

    def close(self) -> None:
        """Passes on what is there, and closes the stream."""
        self.pump()
        if self._rest:
            self._write([self._rest])
        os.close(self.fd)


def _write_all(to: IO[Any], data: bytes) -> None:
    try:
        to.write(data)
        to.flush()
    except OSError:
        pass  # nobody reads any more; the ranks go on


def say(text: str) -> None:
    """A line of the launcher itself."""
    print(f"smp run: {text}", file=sys.stderr, flush=True)
