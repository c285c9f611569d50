"""Ends processes with all that they have started, also those that left their group or parent.

A command that hangs may have started others, which keep memory of the GPU and the pipe of the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


class TimedOut(Exception):
    """Something did not end within its limit. It says nothing about what it would have found."""


def parents() -> dict[int, int]:
    """Returns the parent of each process that runs; zombies do not."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(path.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have started."""
    known, found = parents(), [pid]
    for ancestor in found:
        found += [child for child, parent in known.items() if parent == ancestor]
    return found[1:]


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(pid: int) -> None:
    """Kills the descendants of a process, also those that they start meanwhile."""
    for _ in range(20):
        left = descendants(pid)
        if not left:
            return
        for found in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process, if it has not ended, and its descendants."""
    if process.poll() is None:
        # The process first stops, so that it starts no others.
        process.send_signal(signal.SIGSTOP)
        end_descendants(process.pid)
        process.kill()
        process.wait()


def run(command: Sequence[str], limit_s: float, env: Mapping[str, str], output: int | None) -> int:
    """Runs a command; returns its status.

    Args:
        output: file descriptor of its output; that of this process if None.

    Raises:
        TimedOut: it was killed, with its descendants.
    """
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired as error:
        raise TimedOut(f"it did not end within {limit_s:.0f} s") from error
    finally:
        end(process)


def words_of(status: int) -> str:
    """Describes the status of a process that has ended."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
