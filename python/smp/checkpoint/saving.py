"""Implements ``smp.save_checkpoint``: saves all ranks' parts, or the whole model, to a folder."""

from __future__ import annotations

import logging
import os
import time
import weakref
from pathlib import Path
from typing import Any

from smp.checkpoint import folder
from smp.checkpoint.handle import SaveHandle, finish_running, running, set_running
from smp.checkpoint.partial_save import WHAT, PartialSave
from smp.checkpoint.staging import Staging
from smp.checkpoint.store import names
from smp.checkpoint.store.job import JobStore, store_of, stores_in_use
from smp.checkpoint.store.plan import Holding
from smp.checkpoint.whole_model import save_whole
from smp.model import DistributedModel
from smp.modules import packed
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.world import runtime
from smp.world.roll_call import roll_call

_log = logging.getLogger("smp")
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

    Collective over all ranks, with equal arguments (only the first rank's ``user_content`` counts).
    A save that is interrupted leaves the previous checkpoint; ``path/newest`` names the last
    complete one, ``<tag>_partial`` or ``<tag>``.

    Args:
        path: folder that all ranks see; made if missing. Or an address of a store, such as
            ``s3://bucket/prefix``. Then the checkpoint is completed in a folder below
            `SMP_STORE_FOLDER`, which all ranks see, and each rank sends its share to the store in
            the background; see :func:`smp.wait_for_uploads`.
        tag: name of this checkpoint: ``path/<tag>_partial``, or the file ``path/<tag>``.
        partial: whether each rank writes its own part. Otherwise the first rank gathers the whole
            model tensor by tensor and writes it, and the optimizer is left out.
        model: model to save; None: only the optimizer is saved, with masters.
        optimizer: optimizer to save; None: only the model is saved.
        user_content: any value that ``torch.save`` takes; see :func:`smp.resume_from_checkpoint`
            for the value that is loaded.
        translate_if_full: whether a whole model gets the names of Hugging Face if it has
            translators.
        num_kept_partial_checkpoints: most partial checkpoints that stay in the folder and in the
            store; the oldest are deleted.
        blocking: False: take a copy of this rank's state in host memory and write it in the
            background. The next save, `smp.shutdown` and ``wait()`` of the result wait for it. The
            optimizer's state is copied in the background, too, and an update by the optimizer waits
            until that is done; code that changes this state otherwise has to wait for the save. The
            memory of the copy is kept for the next one, until `smp.shutdown`.

    Returns:
        None, or the handle of a save in the background.

    Raises:
        ValueError: on all ranks, if arguments are invalid, or differ.
        RuntimeError: on all ranks, if one could not write.
        PeerFailure: not all ranks have called this.
    """
    begin_s = time.monotonic()
    current = runtime.current()
    error = _wait_for_running(current)
    store: JobStore | None = None
    left: list[Holding] = []
    if names.is_address(path):
        try:
            store = store_of(current, os.fspath(path))
            left = store.find_unsent()
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
    problem = _problem(
        tag, partial, model, optimizer, num_kept_partial_checkpoints, blocking, store is not None
    )
    call = {
        "path": os.fspath(path),
        "tag": tag,
        "partial": partial,
        "model": None if not isinstance(model, DistributedModel) else model._idx,
        "optimizer": optimizer is not None,
        "translate_if_full": translate_if_full,
        "num_kept_partial_checkpoints": num_kept_partial_checkpoints,
        "blocking": blocking,
        "SMP_STORE_PER_HOST": current.rank.settings.store_per_host,
        "error": error or problem,
    }
    generation = folder.new_generation() if store is None else store.new_generation()
    snippet = f"smp.save_checkpoint(path, tag={tag!r}, partial={partial}, model=model, ...)"
    told = roll_call(current.rank, WHAT, call, snippet, (generation, left))
    generation = told[0][0]
    current.wrapped.spread_written()
    if store is not None:
        store.go_on([one[1] for one in told])
    if not partial:
        assert model is not None
        save_whole(
            Path(path), tag, model, user_content, translate_if_full, generation, current.rank
        )
        _record_whole(current, Path(path, tag), begin_s)
        return None
    if not blocking and current not in _staging:
        _staging[current] = Staging()
        # A shutdown waits for the save, and raises its error.
        current.on_shutdown(lambda: _end(current))
    save = PartialSave(
        Path(path) if store is None else store.root, tag, model, optimizer, user_content,
        generation, num_kept_partial_checkpoints, None if blocking else _staging[current],
        current.rank, current.steps, current.record, begin_s, store,
    )  # fmt: skip
    if blocking:
        save.run()
        return None
    handle = save.run_in_background()
    set_running(current, handle)
    return handle


def wait_for_uploads(timeout_s: float | None = None) -> bool:
    """Waits until all checkpoints that this job has saved to stores so far are complete there.

    Not collective: each rank waits by itself, for the shares of all ranks. `smp.shutdown`, which
    runs by itself at the end of a script, waits as well; a job that has failed does not.

    Args:
        timeout_s: seconds; None: as long as it takes.

    Returns:
        True; False if some are not complete after ``timeout_s``, or the job has failed. Their
        transfer goes on in the background; if the process ends, the next job with this folder
        sends the rest.

    Raises:
        RuntimeError: a checkpoint could not be saved or sent; raised once, with the reason.
    """
    current = runtime.current()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    handle = running(current)
    if handle is not None:
        try:
            handle.wait(timeout_s)
        except TimeoutError:
            return False
    return all(
        store.uploader.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for store in stores_in_use(current)
    )


class StoppingSaver:
    """The `preemption.Saver` of this library, which saves checkpoints of ranks that are to stop."""

    def prepare(self, current: runtime.Runtime, path: str) -> None:
        """Checks the store of an address, the first time.

        Raises:
            RuntimeError: the store cannot be used; the text has the reason.
        """
        if not names.is_address(path):
            return
        try:
            store_of(current, path).find_unsent()
        except Exception as error:
            raise RuntimeError(
                f"{current.rank.prefix}a preemption could not save to {path}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def save(self, path: str, **options: Any) -> Any:
        """Calls `save_checkpoint`."""
        return save_checkpoint(path, **options)

    def end_uploads(self, current: runtime.Runtime, limit_s: float) -> None:
        """Waits for transfers to stores, and ends them after the limit, in seconds.

        Raises:
            RuntimeError: a save in the background has failed.
        """
        stores = stores_in_use(current)
        handle = running(current)
        if stores and handle is not None:
            handle.wait()  # otherwise nothing would be saved
        deadline = time.monotonic() + limit_s
        for store in stores:
            reason = f"after {limit_s:g} s (SMP_UPLOAD_WAIT_S)"
            try:
                is_over = store.uploader.wait(max(0.0, deadline - time.monotonic()))
            except RuntimeError as error:
                is_over, reason = False, f"({error})"
            if not is_over:
                names_left = sorted({key.name for key in store.uploader.waiting()})
                _log.warning(
                    "%sleaving before %s is complete in %s, %s. It is complete in %s: the next job "
                    "that has this folder goes on from it and sends what is missing; others go on "
                    "from an older one",
                    current.rank.prefix,
                    ", ".join(names_left) or "a checkpoint",
                    store,
                    reason,
                    store.root,
                )
            store.uploader.stop()


def _problem(
    tag: str,
    partial: bool,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    num_kept: int | None,
    blocking: bool,
    is_address: bool,
) -> str | None:
    """Returns the reason why these arguments are invalid, or None."""
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
    if is_address and not partial:
        return "a store takes partial checkpoints; save the whole model to a folder"
    weight = None if model is None or partial else packed.name_in(model.get_module())
    if weight is not None:
        return (
            f"a whole model is written in full precision, and weights are quantized, {weight} for "
            "one; use partial=True, whose files leave these out, or smp.save_adapters"
        )
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


def _record_whole(current: runtime.Runtime, path: Path, begin_s: float) -> None:
    if current.rank.global_rank == 0:
        num_bytes, step = path.stat().st_size, current.steps.num_finished
        seconds = time.monotonic() - begin_s
        current.record.saved(path, path.name, step, num_bytes, seconds)


def _wait_for_running(current: runtime.Runtime) -> str | None:
    """Waits for a save in the background; returns its error, if it has one."""
    try:
        finish_running(current)
    except RuntimeError as error:
        return str(error)
    return None


def _end(current: runtime.Runtime) -> None:
    try:
        finish_running(current)
    finally:
        _staging.pop(current, None)
