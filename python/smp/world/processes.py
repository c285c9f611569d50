"""Asks the system where processes run, and whether others of this machine have ended."""

from __future__ import annotations

import os

_ENDED_STATES = "ZX"  # a process that has ended stays listed until its parent asks for its status


def namespace(kind: str) -> str:
    """Returns a name of the machine and a namespace in which this process runs.

    Args:
        kind: "net", "pid" or another one of Linux.

    Raises:
        OSError: the system does not say it.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink(f'/proc/self/ns/{kind}')}"


def process_space() -> str:
    """Returns a name of the space in which processes have their numbers.

    Two processes for which it is equal can look at each other. Empty: this process sees none, such
    as where `/proc` is that of another space.
    """
    try:
        return namespace("pid") if os.readlink("/proc/self") == str(os.getpid()) else ""
    except OSError:
        return ""


def has_ended(pid: int, space: str) -> bool:
    """Returns whether a process is known to have ended; False: it lives, or that is not known.

    If another process has got the number meanwhile, the process counts as alive.

    Args:
        pid: number of the process.
        space: `process_space` of that process.
    """
    if not space or space != process_space():
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in front of the state may have any character.
            state = file.read().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return False
    return state.decode() in _ENDED_STATES
