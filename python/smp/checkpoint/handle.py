"""Runs a save that goes on in the background."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

from smp.world import runtime, thread_device

#: The last save in the background, by runtime; None once a caller has waited for it.
_running: weakref.WeakKeyDictionary[runtime.Runtime, SaveHandle | None]
_running = weakref.WeakKeyDictionary()


class SaveHandle:
    """The result of :func:`smp.save_checkpoint` with ``blocking=False``.

    Args:
        work: writes and commits; receives a function that takes the number of bytes so far.
        total_bytes: number of bytes that this rank writes.
        on_waited: called once, when a caller has waited for the end.
        begin_s: time at which the saving call began, by `time.monotonic`, in seconds.
        held_up_s: returns the seconds for which training has waited after that call.
        device: device of this rank, on which the saving thread works.
    """

    def __init__(
        self,
        work: Callable[[Callable[[int], None]], None],
        total_bytes: int,
        on_waited: Callable[[], None],
        begin_s: float,
        held_up_s: Callable[[], float],
        device: torch.device,
    ) -> None:
        self._work = work
        self._total_bytes = total_bytes
        self._written = 0
        self._error: BaseException | None = None
        self._on_waited = on_waited
        self._has_waited = False
        self._held_up_s = held_up_s
        self._device = device
        # A daemon, so that it does not hold up the end of the process; smp.shutdown waits for it.
        self._thread = threading.Thread(target=self._run, name="smp-save", daemon=True)
        self._thread.start()
        self._call_s = time.monotonic() - begin_s

    def _run(self) -> None:
        try:
            thread_device.enter(self._device)
            self._work(self._note)
        except BaseException as error:
            self._error = error

    def _note(self, num_bytes: int) -> None:
        self._written = num_bytes

    def done(self) -> bool:
        """Returns whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def progress(self) -> float:
        """Returns the written share of this rank's bytes, in [0, 1]; 1 does not mean committed."""
        return min(1.0, self._written / self._total_bytes) if self._total_bytes else 1.0

    def stall_s(self) -> float:
        """Returns the seconds for which training has waited for this save so far, on this rank.

        It waits in the call, and before an update of the optimizer while its state is copied.
        """
        return self._call_s + self._held_up_s()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint has its name.

        Raises:
            TimeoutError: the save is not over after ``timeout_s``.
            RuntimeError: some rank could not write its part; there is no checkpoint then.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint is not complete after {timeout_s} s")
        if not self._has_waited:
            self._has_waited = True
            self._on_waited()
        if self._error is not None:
            raise RuntimeError(f"saving in the background failed: {self._error}") from self._error

    def finish(self) -> None:
        """Waits, unless a caller has waited; raises as :meth:`wait`."""
        if not self._has_waited:
            self.wait()


def set_running(current: runtime.Runtime, handle: SaveHandle) -> None:
    """Stores the save that the next one and the end of the job wait for."""
    _running[current] = handle


def running(current: runtime.Runtime) -> SaveHandle | None:
    """Returns the save that :func:`finish_running` waits for."""
    return _running.get(current)


def finish_running(current: runtime.Runtime) -> None:
    """Waits for the save in the background, once; raises as `SaveHandle.wait`."""
    handle = _running.get(current)
    if handle is not None:
        _running[current] = None
        handle.finish()
