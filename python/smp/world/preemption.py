"""Preemption of machines: all ranks stop at one boundary between steps, to be resumed.

A script asks at the end of each iteration, and then saves::

    if smp.preemption_requested():
        smp.save_checkpoint(folder, tag=f"step{step}", model=model, optimizer=optimizer, ...)
        smp.preemption.leave()

Alternatively the library does this, after :func:`save_to` or with the variable
`SMP_PREEMPTION_PATH`. Otherwise SIGTERM ends the process as usual. See docs/design/preemption.md.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch

import smp._C as _C
from smp.world import failure, runtime
from smp.world.log import first_rank_log
from smp.world.rank import Rank

__all__ = ["EXIT_RESUME", "leave", "request", "requested", "save_to"]

EXIT_RESUME = 75
"""Status of a process that has saved and is to be started again (EX_TEMPFAIL of sysexits.h).
``smp run`` has the same number."""


def leave_without_place(rank: Rank) -> NoReturn:
    """Ends a process that the other ranks go on without.

    Launchers that start failed processes again, as Kubernetes does, are to start this one, too: it
    will wait for a place. ``smp run`` knows from the ranks which ones it may replace.

    Args:
        rank: rank of this process.

    Raises:
        SystemExit: always.
    """
    may_wait = rank.config.on_failure == "spare" and rank.launch.launcher != "smp"
    raise SystemExit(EXIT_RESUME if may_wait else 0)


@dataclass(frozen=True)
class _Automatic:
    """Arguments with which the library saves by itself."""

    path: str
    user_content: Callable[[], Any] | None
    keep: int | None


class Saver(Protocol):
    """Saves checkpoints; implemented in a layer above."""

    def prepare(self, current: runtime.Runtime, path: str) -> None:
        """Checks that it can save to a path; raises if not. Not collective."""

    def save(self, path: str, **options: Any) -> Any:
        """Saves like `smp.save_checkpoint`."""

    def end_uploads(self, current: runtime.Runtime, limit_s: float) -> None:
        """Waits for uploads to stores, and ends them after the limit. Not collective."""


class _Process:
    """State of the process that outlives one `init`."""

    automatic: _Automatic | None = None
    saver: Saver | None = None
    has_handler = has_noted = False
    previous_handler: Any = None


def _run() -> runtime.Runtime:
    return runtime.current()


def requested() -> bool:
    """Returns whether all ranks stop here, because one received SIGTERM or called `request`.

    All ranks call this equally often and at the same places, and get the same answers: ranks that
    are behind the others get False until they have caught up. Communicates only after a request.
    From the first call on, SIGTERM is such a request and does not end the process.

    Raises:
        smp.PeerFailure: a stop was requested, but a rank has failed, so nothing can be saved.
    """
    return _arrive(_run())


def _arrive(current: runtime.Runtime) -> bool:
    rank = current.rank
    if rank.skips_call():  # the others have passed this boundary
        return False
    rank.check_process("smp.preemption_requested")
    _install_handler()
    if _Process.has_handler and not _Process.has_noted:
        _Process.has_noted = True
        failure.note_stoppable(current.number)
    return rank.stops.arrive(rank.timeout_s)


def request() -> None:
    """Asks all ranks to stop at the next boundary; one rank's call is enough. Returns at once."""
    _run().rank.request_stop()


def leave() -> NoReturn:
    """Ends this process with status 75, which asks the launcher to start it again.

    All ranks call it, after saving. It first waits until uploads to a store have finished, for at
    most `SMP_UPLOAD_WAIT_S`, and reports unfinished ones.
    """
    if _Process.saver is not None and runtime.is_initialized():
        current = _run()
        _Process.saver.end_uploads(current, current.rank.settings.upload_wait_s)
        current.record.preempted(EXIT_RESUME)
    raise SystemExit(EXIT_RESUME)


def save_to(
    path: str | os.PathLike[str],
    *,
    user_content: Callable[[], Any] | None = None,
    keep: int | None = None,
) -> None:
    """Lets the library handle requests: it saves and leaves before a training step.

    That is the beginning of the first call of a step function, with gradients enabled, after an
    optimizer has made its update, when nothing is lost. Call it on all ranks, once. With more than
    one model or optimizer the first training step raises; a script with several asks
    :func:`requested` and saves them itself.

    Args:
        path: folder of `save_checkpoint` that all ranks see, or address. `SMP_PREEMPTION_PATH`
            does the same without a change of the script.
        user_content: called when saving; returns what the script needs to continue, such as the
            number of the next step, or the state of a scheduler.
        keep: `num_kept_partial_checkpoints`.
    """
    _Process.automatic = _Automatic(os.fspath(path), user_content, keep)
    _install_handler()


def use_saver(saver: Saver) -> None:
    """Sets the object that saves checkpoints."""
    _Process.saver = saver


def before_step(current: runtime.Runtime) -> None:
    """Saves and leaves if all ranks stop here. Called when a step function begins.

    Raises:
        SystemExit: after saving.
        RuntimeError: there is more than one model or optimizer, or no such store. This is checked
            in every training step, not only when it is time to save.
        smp.PeerFailure: a rank has failed, as in `requested`.
    """
    automatic, path = _Process.automatic, current.rank.settings.preemption_path
    if automatic is None and path is not None:
        automatic = _Automatic(path, None, None)
    if automatic is None or not torch.is_grad_enabled() or current.steps.has_gradients:
        return
    model, optimizer = _what_to_save(current)
    if _Process.saver is not None:
        _Process.saver.prepare(current, automatic.path)
    if _arrive(current):
        _save(current, automatic, model, optimizer)
        leave()


def _what_to_save(current: runtime.Runtime) -> tuple[Any, Any]:
    """Returns the model and the optimizer; None for an unwrapped one."""
    problem = _problem(current)
    if problem is not None:
        gc.collect()  # objects that the script has dropped do not count, on any rank
        problem = _problem(current)
    if problem is not None:
        raise RuntimeError(f"{current.rank.prefix}{problem}")
    return current.wrapped.model, current.wrapped.optimizer


def _problem(current: runtime.Runtime) -> str | None:
    """Returns why the library cannot save these models and optimizers, or None."""
    # One optimizer may have been wrapped several times.
    num_optimizers = len({id(wrapped.optimizer) for wrapped in current.wrapped.optimizers})
    if len(current.wrapped.models) <= 1 and num_optimizers <= 1:
        return None
    return (
        "SMP_PREEMPTION_PATH and smp.preemption.save_to save one model with one optimizer, but "
        f"{len(current.wrapped.models)} models ({current.wrapped.candidates}) and {num_optimizers} "
        "optimizers are wrapped, and all but one would be lost. Do without these; ask "
        "smp.preemption_requested() at the end of each iteration, save each model with "
        "smp.save_checkpoint into a folder of its own, and call smp.preemption.leave()"
    )


def _save(current: runtime.Runtime, automatic: _Automatic, model: Any, optimizer: Any) -> None:
    if not current.steps.has_trained:
        first_rank_log.warning("smp: stopping before the first step; there is nothing to save")
        return
    if _Process.saver is None:
        raise RuntimeError(
            f"{current.rank.prefix}nothing saves checkpoints; see smp.world.preemption.use_saver"
        )
    tag = f"preempted{current.steps.num_finished}"
    first_rank_log.warning(f"smp: saving {automatic.path}/{tag} and leaving (status {EXIT_RESUME})")
    _Process.saver.save(
        automatic.path,
        tag=tag,
        partial=True,
        model=model,
        optimizer=optimizer,
        user_content=None if automatic.user_content is None else automatic.user_content(),
        num_kept_partial_checkpoints=automatic.keep,
    )


def _install_handler() -> None:
    """Takes SIGTERM, once per process; an earlier handler is called, too."""
    if _Process.has_handler:
        return
    if threading.current_thread() is not threading.main_thread():
        if first_rank_log.is_new("no SIGTERM"):
            first_rank_log.warning(
                "smp: SIGTERM does not request a stop here: steps run on thread "
                f"{threading.current_thread().name!r}, and only the main one gets "
                "signals; call smp.preemption.request() when the machine is about to end"
            )
        return
    _Process.has_handler = True
    _Process.previous_handler = signal.signal(signal.SIGTERM, on_signal)


def on_signal(number: int, frame: FrameType | None) -> None:
    """Requests a stop on SIGTERM; called by the interpreter."""
    rank = runtime.current().rank if runtime.is_initialized() else None
    if rank is None or not rank.is_own_process:
        # This is a worker of a loader, or `shutdown` has run: no step will come.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    ends = not rank.may_lose_ranks  # other ranks go on after a failure, and then stop
    if ends and rank.board is not None and (fault := rank.board.fault_text()) is not None:
        raise _C.PeerFailure(f"{rank.prefix}ended by SIGTERM after a failure: {fault}")
    print(
        f"{rank.prefix}SIGTERM: all ranks will stop at the next boundary between steps",
        file=sys.stderr,
        flush=True,
    )
    rank.request_stop()
    if callable(_Process.previous_handler):
        _Process.previous_handler(number, frame)
