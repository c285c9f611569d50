"""What happens when the process ends, fails or forks."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

import smp._C as _C
from smp.world import failure

_MAX_TRACEBACK_LINES = 30


def make_log_visible(logger: logging.Logger) -> None:
    """Shows what the library logs unless the program has set up logging itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def describe_exception(error: BaseException) -> str:
    """The last lines of the traceback, for the screens of other ranks."""
    if isinstance(error, _C.PeerFailure):
        return str(error)  # says it all
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-_MAX_TRACEBACK_LINES:])


def install(
    on_uncaught: Callable[[BaseException], bool],
    on_exit: Callable[[], None],
    after_fork: Callable[[], None],
) -> None:
    """Calls back on an uncaught exception, at exit, and in forked children. Once per process.

    An exception that ``on_uncaught`` has shown is not printed a second time.

    The callbacks stay for the life of the process, because others may put hooks on top that
    cannot be taken away again; so they should be plain functions that look up what they need.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_shown = False
        try:
            is_shown = on_uncaught(error)
        finally:
            if not (is_shown and failure.is_plain(previous)):
                previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(on_exit)
    os.register_at_fork(after_in_child=after_fork)


# Nobody else's, as far as signals without a name can be.
_STACKS_SIGNAL, _STACK_SIGNAL = signal.SIGRTMAX - 1, signal.SIGRTMAX - 2
_INTERRUPT_SIGNAL, _NATIVE_SIGNAL = signal.SIGRTMAX - 3, signal.SIGRTMAX - 4
_stacks_fd = -1


def register_stack_dump() -> tuple[tuple[int, int, int], int]:
    """Signals on which this process writes the Python stacks of all threads, that of the one that
    gets the signal, and its native stack (whose handler is not installed here), and the file.

    It does so without the interpreter's lock, hence also while a thread hangs that holds it.
    """
    global _stacks_fd
    if _stacks_fd < 0:
        _stacks_fd = os.memfd_create("smp-stacks", os.MFD_CLOEXEC)
    faulthandler.register(_STACKS_SIGNAL, file=_stacks_fd, all_threads=True, chain=False)
    faulthandler.register(_STACK_SIGNAL, file=_stacks_fd, all_threads=False, chain=False)
    return (_STACKS_SIGNAL, _STACK_SIGNAL, _NATIVE_SIGNAL), _stacks_fd


def register_interrupt(callback: Callable[[], None]) -> int:
    """A signal on which the thread of the script calls back between two lines of Python; -1 where
    `smp.init` runs on another thread, which Python does not allow.
    """
    if threading.current_thread() is not threading.main_thread():
        return -1
    signal.signal(_INTERRUPT_SIGNAL, lambda number, frame: callback())
    return _INTERRUPT_SIGNAL


def keep_forever(owner: object) -> None:
    """Never runs the destructor of `owner` in this process.

    For a forked child: it has the parent's objects but not the threads that their destructors
    would join.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
