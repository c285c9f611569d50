"""Lines of the event file of a job: one JSON object each (docs/orchestrators.md has the events).

``smp run`` loads this file by its path, without torch, so it imports the standard library alone.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from typing import Any

#: Version of the lines and of the manifest; it changes if a field gets another meaning.
VERSION = 1
PATH_VARIABLE = "SMP_EVENTS"
MANIFEST_VARIABLE = "SMP_MANIFEST"
RUN_VARIABLE = "SMP_RUN_ID"


def append(path: str, event: str, run: str, attempt: int, values: Mapping[str, Any]) -> None:
    """Appends a line in one write, so that it is there as a whole or not at all.

    A line that an earlier process could not end (a full disk) is ended first.

    Args:
        path: path of the file; made if missing.
        event: name of the event.
        run: name of the job, equal in all its starts.
        attempt: number of earlier starts.
        values: further fields.

    Raises:
        OSError: the file cannot be written.
    """
    head = {"v": VERSION, "time": time.time(), "event": event, "run": run, "attempt": attempt}
    line = json.dumps({**head, **values}).encode() + b"\n"
    file = open_file(path)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(file)


def open_file(path: str) -> int:
    """Opens the file to append; raises an OSError where that is impossible."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
