"""Encodes messages between ``smp run`` and its process on each host, each as a line of JSON."""

from __future__ import annotations

import json
from typing import IO, Any

# This mark begins lines of a host's process, since shells print greetings there, too.
MARK = b"\x1esmp "


def to_text(data: bytes) -> str:
    """Converts any bytes to text that JSON can carry."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """Returns the bytes that `to_text` has converted."""
    return text.encode("utf-8", "surrogateescape")


def send(to: IO[bytes], kind: str, mark: bytes = b"", **content: Any) -> None:
    """Writes a message as a line.

    Raises:
        OSError: the other side no longer reads.
    """
    to.write(mark + json.dumps({"kind": kind, **content}).encode() + b"\n")
    to.flush()


def read(line: bytes, mark: bytes = b"") -> dict[str, Any] | None:
    """Returns the message in a line; None if the line is something else."""
    if not line.startswith(mark):
        return None
    try:
        content = json.loads(line[len(mark) :])
    except ValueError:
        return None
    return content if isinstance(content, dict) and "kind" in content else None
