"""``smp.save_checkpoint``: what every rank holds, or the whole model, into one folder."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from pathlib import Path
from typing import Any

from smp.checkpoint.handle import SaveHandle
from smp.checkpoint.partial_save import WHAT, PartialSave
from smp.checkpoint.staging import Staging
from smp.checkpoint.whole_model import save_whole
from smp.model import DistributedModel
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.world import runtime
from smp.world.roll_call import roll_call

#: The last save in the background, by runtime; None once somebody has waited for it.
_running: weakref.WeakKeyDictionary[runtime.Runtime, SaveHandle | None]
_running = weakref.WeakKeyDictionary()
_staging: weakref.WeakKeyDictionary[runtime.Runtime, Staging] = weakref.WeakKeyDictionary()


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    blocking: bool = True,
) -> SaveHandle | None:
    """Saves a job so that it can go on on any layout, or the whole model in one file.

    Collective over all ranks, with equal arguments (``user_content`` is that of the first rank). A
    save that is interrupted leaves the previous checkpoint; ``path/newest`` names the last one that
    is complete, ``<tag>_partial`` or ``<tag>``.

    Args:
        path: folder that all ranks see; made if missing.
        tag: of this checkpoint: ``path/<tag>_partial``, or the file ``path/<tag>``.
        partial: every rank writes what it holds. Else the whole model is written by the first rank,
            to which it comes tensor by tensor, and the optimizer is left out.
        model: None: only the optimizer is saved, with masters.
        optimizer: None: only the model is saved.
        user_content: anything that ``torch.save`` takes; see :func:`smp.resume_from_checkpoint`
            for what comes back.
        translate_if_full: give a whole model the names of Hugging Face where it has translators.
        num_kept_partial_checkpoints: delete the oldest partial ones beyond this number.
        blocking: False: take a copy of this rank's state in host memory and write it in the
            background. The next save, `smp.shutdown` and ``wait()`` of the result wait for it. The
            optimizer's state is copied in the background, too, and an update by the optimizer waits
            until that is done; code that changes this state otherwise has to wait for the save. The
            memory of the copy is kept for the next one, until `smp.shutdown`.

    Returns:
        None, or what tells about a save in the background.

    Raises:
        ValueError: on all ranks, for arguments that cannot be, or that differ.
        RuntimeError: on all ranks, if one could not write.
        PeerFailure: not all ranks have called it.
    """
    begin_s = time.monotonic()
    current = runtime.current()
    error = _wait_for_running(current)
    call = {
        "path": os.fspath(path),
        "tag": tag,
        "partial": partial,
        "model": None if not isinstance(model, DistributedModel) else model._idx,
        "optimizer": optimizer is not None,
        "translate_if_full": translate_if_full,
        "num_kept_partial_checkpoints": num_kept_partial_checkpoints,
        "blocking": blocking,
        "error": error
        or _problem(tag, partial, model, optimizer, num_kept_partial_checkpoints, blocking),
    }
    generation = f"{time.time_ns():x}{secrets.token_hex(4)}"
    snippet = f"smp.save_checkpoint(path, tag={tag!r}, partial={partial}, model=model, ...)"
    generation = roll_call(current.rank, WHAT, call, snippet, generation)[0]
    if not partial:
        assert model is not None
        save_whole(
            Path(path), tag, model, user_content, translate_if_full, generation, current.rank
        )
        return None
    if not blocking and current not in _staging:
        _staging[current] = Staging()
        # A shutdown waits, and hears of an error, too.
        current.on_shutdown(lambda: _end(current))
    save = PartialSave(
        Path(path), tag, model, optimizer, user_content, generation, num_kept_partial_checkpoints,
        None if blocking else _staging[current], current.rank, current.steps,
    )  # fmt: skip
    if blocking:
        save.run()
        return None
    handle = save.run_in_background(begin_s)
    _running[current] = handle
    return handle


def _problem(
    tag: str,
    partial: bool,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    num_kept: int | None,
    blocking: bool,
) -> str | None:
    """Why these arguments cannot be."""
    if not isinstance(tag, str) or not tag:
        return f"tag must be a text that is not empty, got {tag!r}"
    if model is not None and not isinstance(model, DistributedModel):
        return f"model must be a DistributedModel, got a {type(model).__name__}"
    if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
        return f"optimizer must be a DistributedOptimizer, got a {type(optimizer).__name__}"
    if model is None and (optimizer is None or not partial):
        return "there is nothing to save: give model=, or with partial=True optimizer="
    if num_kept is not None and num_kept < 1:
        return f"num_kept_partial_checkpoints must be at least 1, got {num_kept}"
    if not blocking and not partial:
        return "blocking=False is for partial=True; the whole model needs all ranks to send it"
    models: list[DistributedModel | None] = [model]
    if model is None and optimizer is not None:
        models = [*optimizer._models()]
        if len(models) != 1:
            return f"the optimizer has parameters of {len(models)} models; give model="
    for saved in models:
        if saved is not None and not saved.partitioned:
            return (
                "the model is not partitioned yet; save after the first step, or before it in a "
                "hook given to register_post_partition_hook"
            )
    return None


def _wait_for_running(current: runtime.Runtime) -> str | None:
    """Waits for a save in the background; its error, if it has one."""
    try:
        _finish(current)
    except RuntimeError as error:
        return str(error)
    return None


def _end(current: runtime.Runtime) -> None:
    try:
        _finish(current)
    finally:
        _staging.pop(current, None)


def _finish(current: runtime.Runtime) -> None:
    handle = _running.get(current)
    if handle is not None:
        _running[current] = None
        handle.finish()
