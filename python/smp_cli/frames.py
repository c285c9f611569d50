"""Encodes the messages of the process of ``smp run`` on a host as lines of JSON."""

from __future__ import annotations

import json
from typing import IO, Any

# This mark begins the lines, since shells print greetings there, too.
_MARK = b"\x1esmp "


def send(to: IO[bytes], **message: Any) -> None:
    """Writes a message as a line.

    Raises:
        OSError: the other side no longer reads.
    """
    to.write(_MARK + json.dumps(message).encode() + b"\n")
    to.flush()


def read(line: bytes) -> dict[str, Any] | None:
    """Returns the message in a line; None if the line is something else."""
    if not line.startswith(_MARK):
        return None
    content: dict[str, Any] = json.loads(line[len(_MARK) :])
    return content
