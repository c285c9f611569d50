"""What happens when the process ends, fails or forks."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from smp import _C

_MAX_TRACEBACK_LINES = 30


def describe_exception(error: BaseException) -> str:
    """The last lines of the traceback, for the screens of other ranks."""
    if isinstance(error, _C.PeerFailure):
        return str(error)  # says it all
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-_MAX_TRACEBACK_LINES:])


def install(
    on_uncaught: Callable[[BaseException], None],
    on_exit: Callable[[], None],
    after_fork: Callable[[], None],
) -> None:
    """Calls back on an uncaught exception, at exit, and in forked children. Once per process.

    The callbacks stay for the life of the process, because others may put hooks on top that
    cannot be taken away again; so they should be plain functions that look up what they need.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            on_uncaught(error)
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(on_exit)
    os.register_at_fork(after_in_child=after_fork)


def keep_forever(owner: object) -> None:
    """Never runs the destructor of `owner` in this process.

    For a forked child: it has the parent's objects but not the threads that their destructors
    would join.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
