"""What happens when the process ends, fails or forks."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

_MAX_TRACEBACK_LINES = 30


def describe_exception(error: BaseException) -> str:
    """The last lines of the traceback, for the screens of other ranks."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-_MAX_TRACEBACK_LINES:])


class ProcessHooks:
    """Calls back on an uncaught exception and at exit, from install to remove."""

    def __init__(
        self, on_uncaught: Callable[[BaseException], None], on_exit: Callable[[], None]
    ) -> None:
        self._on_uncaught = on_uncaught
        self._on_exit = on_exit
        self._previous = sys.excepthook
        sys.excepthook = self._hook
        atexit.register(self._on_exit)

    def remove(self) -> None:
        """Restores what was there, unless somebody has put a hook on top of ours."""
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            self._on_uncaught(error)
        finally:
            self._previous(kind, error, trace)


def keep_forever(owner: object) -> None:
    """Never runs the destructor of `owner` in this process.

    For a forked child: it has the parent's objects but not the threads that their destructors
    would join.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def call_after_fork(callback: Callable[[], None]) -> None:
    """Calls back in every child that is forked from now on."""
    os.register_at_fork(after_in_child=callback)
