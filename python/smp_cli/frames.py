"""What ``smp run`` and its process on each host tell each other: a line of JSON each time."""

from __future__ import annotations

import json
from typing import IO, Any

# In front of lines of a host: shells print greetings there, too.
MARK = b"\x1esmp "


def to_text(data: bytes) -> str:
    """Any bytes as text that JSON can carry."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """The bytes that `to_text` was given."""
    return text.encode("utf-8", "surrogateescape")


def send(to: IO[bytes], kind: str, mark: bytes = b"", **content: Any) -> None:
    """Writes a line.

    Raises:
        OSError: nobody reads any more.
    """
    to.write(mark + json.dumps({"kind": kind, **content}).encode() + b"\n")
    to.flush()


def read(line: bytes, mark: bytes = b"") -> dict[str, Any] | None:
    """What a line says; None if it is something else."""
    if not line.startswith(mark):
        return None
    try:
        content = json.loads(line[len(mark) :])
    except ValueError:
        return None
    return content if isinstance(content, dict) and "kind" in content else None
