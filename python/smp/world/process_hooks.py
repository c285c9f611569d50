"""Installs hooks for the end, failure and fork of the process."""

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
    """Returns the last lines of the traceback, for the screens of other ranks."""
    if isinstance(error, _C.PeerFailure):
        return str(error)  # the text is complete
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
    cannot be removed; so they should be plain functions that look up what they need.
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


# Signals without a name, which other libraries hardly use.
_STACKS_SIGNAL, _STACK_SIGNAL = signal.SIGRTMAX - 1, signal.SIGRTMAX - 2
_INTERRUPT_SIGNAL, _NATIVE_SIGNAL = signal.SIGRTMAX - 3, signal.SIGRTMAX - 4
_stacks_fd = -1


def register_stack_dump() -> tuple[tuple[int, int, int], int]:
    """Registers signals that make this process write its stacks.

    The handlers do not need the interpreter's lock, so they work while a thread hangs with it.

    Returns:
        Signals for the Python stacks of all threads, for that of the thread that gets the signal,
        and for its native stack (whose handler is not installed here); and the file descriptor.
    """
    global _stacks_fd
    if _stacks_fd < 0:
        _stacks_fd = os.memfd_create("smp-stacks", os.MFD_CLOEXEC)
    faulthandler.register(_STACKS_SIGNAL, file=_stacks_fd, all_threads=True, chain=False)
    faulthandler.register(_STACK_SIGNAL, file=_stacks_fd, all_threads=False, chain=False)
    return (_STACKS_SIGNAL, _STACK_SIGNAL, _NATIVE_SIGNAL), _stacks_fd


def register_interrupt(callback: Callable[[], None]) -> int:
    """Registers a signal on which the script's thread calls back between two lines of Python.

    Returns:
        The signal; -1 if `smp.init` runs on another thread than the main one, where Python does
        not allow this.
    """
    if threading.current_thread() is not threading.main_thread():
        return -1
    signal.signal(_INTERRUPT_SIGNAL, lambda number, frame: callback())
    return _INTERRUPT_SIGNAL


def keep_forever(owner: object) -> None:
    """Keeps `owner` alive for ever, so that its destructor never runs in this process.

    A forked child has the parent's objects but not the threads that their destructors would join.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
