"""Machines that are taken away: all ranks stop at one boundary between steps, to be resumed.

A script asks at the end of each iteration, and does what has to be done::

    if smp.preemption_requested():
        smp.save_checkpoint(folder, tag=f"step{step}", model=model, optimizer=optimizer, ...)
        smp.preemption.leave()

or leaves this to the library, with :func:`save_to` or the variable `SMP_PREEMPTION_PATH`. Before
either, SIGTERM ends a process as ever. See docs/design/preemption.md.
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
from smp.world import runtime
from smp.world.log import first_rank_log
from smp.world.rank import Rank
from smp.world.settings import Settings

__all__ = ["EXIT_RESUME", "leave", "request", "requested", "save_to"]

EXIT_RESUME = 75
"""Status of a process that saved and wants to be started again (EX_TEMPFAIL of sysexits.h).
``smp run`` has the same number."""


@dataclass(frozen=True)
class _Automatic:
    """What the library saves by itself."""

    path: str
    user_content: Callable[[], Any] | None
    keep: int | None


class Saver(Protocol):
    """What saves checkpoints; it lies in a layer above."""

    def prepare(self, current: runtime.Runtime, path: str) -> None:
        """Finds out whether it can save to a path at all; raises if not. Not collective."""

    def save(self, path: str, **options: Any) -> Any:
        """`smp.save_checkpoint`."""

    def end_uploads(self, current: runtime.Runtime, limit_s: float) -> None:
        """Waits for what goes to stores, and ends it after the limit. Not collective."""


class _Process:
    """What belongs to the process and not to one `init`."""

    automatic: _Automatic | None = None
    saver: Saver | None = None
    has_handler = False
    previous_handler: Any = None


def _run() -> runtime.Runtime:
    return runtime.current()


def requested() -> bool:
    """Whether all ranks are to stop here, because one of them received SIGTERM or called `request`.

    All ranks call this equally often and at the same places, and get the same answers: ranks that
    are behind the others still get False until they are as far. Communicates only after somebody
    asked. From the first call on, SIGTERM is such a request and does not end the process.

    Raises:
        smp.PeerFailure: somebody asked, but a rank has failed; there is nothing to be saved then.
    """
    return _arrive(_run().rank)


def _arrive(rank: Rank) -> bool:
    rank.check_process("smp.preemption_requested")
    _install_handler()
    return rank.stops.arrive(rank.timeout_s)


def request() -> None:
    """Asks all ranks to stop at the next boundary; one rank's call is enough. Returns at once."""
    _run().rank.request_stop()


def leave() -> NoReturn:
    """Ends this process with status 75, which tells the launcher to start it again. Call it on all
    ranks, after saving.

    Waits before that until what was saved to a store is there, for at most `SMP_UPLOAD_WAIT_S`, and
    says so if it is not.
    """
    if _Process.saver is not None and runtime.is_initialized():
        current = _run()
        _Process.saver.end_uploads(current, current.rank.settings.upload_wait_s)
    raise SystemExit(EXIT_RESUME)


def save_to(
    path: str | os.PathLike[str],
    *,
    user_content: Callable[[], Any] | None = None,
    keep: int | None = None,
) -> None:
    """From now on a request is honoured by the library: it saves and leaves before a training step.

    That is the beginning of the first call of a step function, with gradients enabled, after an
    optimizer has made its update: nothing is lost then. Call it on all ranks, once. With more than
    one model or optimizer the first training step raises; these are saved by a script that asks
    :func:`requested`.

    Args:
        path: folder of `save_checkpoint`, seen by all ranks, or address. `SMP_PREEMPTION_PATH`
            does the same without a change of the script.
        user_content: called then; what the script needs to go on, such as the number of the step
            that is about to run, or the state of a scheduler.
        keep: `num_kept_partial_checkpoints`.
    """
    _Process.automatic = _Automatic(os.fspath(path), user_content, keep)
    _install_handler()


def use_saver(saver: Saver) -> None:
    """Sets what saves."""
    _Process.saver = saver


def before_step(current: runtime.Runtime) -> None:
    """Called when a step function begins; does not return if all ranks stop here.

    Raises:
        SystemExit: after saving.
        RuntimeError: there is more than one model or optimizer, or no such store. Not only when it
            is time to save, when nobody can do anything about it.
        smp.PeerFailure: as `requested`.
    """
    automatic = _Process.automatic or _from_settings(current.rank.settings)
    if automatic is None or not torch.is_grad_enabled() or current.steps.has_gradients:
        return
    model, optimizer = _what_to_save(current)
    if _Process.saver is not None:
        _Process.saver.prepare(current, automatic.path)
    if _arrive(current.rank):
        _save(current, automatic, model, optimizer)
        leave()


def _what_to_save(current: runtime.Runtime) -> tuple[Any, Any]:
    """The model and the optimizer; None for what was not wrapped."""
    problem = _problem(current)
    if problem is not None:
        gc.collect()  # what nobody has any more is not counted, on any rank
        problem = _problem(current)
    if problem is not None:
        raise RuntimeError(f"{current.rank.prefix}{problem}")
    return current.wrapped.model, current.wrapped.optimizer


def _problem(current: runtime.Runtime) -> str | None:
    """Why these models and optimizers are not saved by the library."""
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


def _from_settings(settings: Settings) -> _Automatic | None:
    path = settings.preemption_path
    return None if path is None else _Automatic(path, None, None)


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
    """Takes SIGTERM, once per process; what handled it before is called, too."""
    if _Process.has_handler:
        return
    if threading.current_thread() is not threading.main_thread():
        if first_rank_log.is_new("no SIGTERM"):
            first_rank_log.warning(
                "smp: SIGTERM is no request to stop here: steps run on thread "
                f"{threading.current_thread().name!r}, and Python gives signals to the main one; "
                "call smp.preemption.request() where you hear of the end"
            )
        return
    _Process.has_handler = True
    _Process.previous_handler = signal.signal(signal.SIGTERM, on_signal)


def on_signal(number: int, frame: FrameType | None) -> None:
    """Called by the interpreter on SIGTERM."""
    rank = runtime.current().rank if runtime.is_initialized() else None
    if rank is None or not rank.is_own_process:
        # A worker of a loader, or after shutdown: no step will come.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if rank.board is not None and (fault := rank.board.fault_text()) is not None:
        raise _C.PeerFailure(f"{rank.prefix}ended by SIGTERM after a failure: {fault}")
    print(
        f"{rank.prefix}SIGTERM: all ranks will stop at the next boundary between steps",
        file=sys.stderr,
        flush=True,
    )
    rank.request_stop()
    if callable(_Process.previous_handler):
        _Process.previous_handler(number, frame)
