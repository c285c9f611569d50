"""Implements ``smp.resume_from_checkpoint``, which loads a checkpoint of this or another layout."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import folder as folders
from smp.checkpoint import manifest as manifests
from smp.checkpoint import random_states
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.entries import canonical_names, model_state
from smp.checkpoint.filling import fill_groups, fill_masters, fill_model, fill_optimizer
from smp.checkpoint.partial_save import PARTITION_FILE, USER_CONTENT_FILE
from smp.checkpoint.reader import FolderReader
from smp.checkpoint.store import names as store_names
from smp.checkpoint.store.fetching import Fetched
from smp.checkpoint.store.job import JobStore, store_of
from smp.checkpoint.whole_files import WholeModel
from smp.config import given_files
from smp.model import DistributedModel, engine_of
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.storage.choose import lockstep_of
from smp.world import runtime
from smp.world.rank import Rank
from smp.world.roll_call import roll_call, together

WHAT = "smp.resume_from_checkpoint"

#: Ids of the hooks that fill models once they are partitioned, in the order of the calls.
_waiting: weakref.WeakKeyDictionary[DistributedModel, list[int]] = weakref.WeakKeyDictionary()


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    *,
    load_optimizer_states: bool | None = None,
    unsafe_user_content: bool = False,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
) -> Any:
    """Loads a checkpoint of :func:`smp.save_checkpoint` into the wrapped model and optimizer.

    Collective over all ranks, with equal arguments. Each rank reads the bytes that it holds,
    whatever the checkpoint's layout is. Weights and the optimizer's state are read when the model
    is partitioned, the latter not before there is an optimizer. An optimizer that was saved without
    its model brings the tensors that it updates. In 16-bit training these are the FP32 masters,
    which give the model its values. Random states are restored on an equal layout, and seeded again
    on another one, with a warning. A model that is not partitioned takes over the partition of the
    checkpoint if that has as many pipeline ranks.

    Args:
        path: folder or address that was given to :func:`smp.save_checkpoint`; with
            ``partial=False`` a folder, also one of Hugging Face. For an address the newest
            checkpoint is taken from the store, or from its folder on this machine if it is
            complete there; each rank fetches the files that it reads.
        tag: tag of the checkpoint; None: the newest partial one, or with ``partial=False`` the
            whole model that ``path/newest`` names, else the weights of Hugging Face in ``path``.
        partial: False: only the model, from a file of :func:`smp.save_checkpoint`, a state dict of
            ``torch.save``, or weights of Hugging Face in one file or with an index.
        strict: whether names that are missing or left over are errors.
        load_optimizer: False: the model alone; random states stay as they are, too.
        load_sharded_optimizer_state: False: with sharded data parallelism masters and loss scale
            alone.
        translate_function: translates the state dict of a whole model to its present names.
            Supported models of Hugging Face need none.
        load_optimizer_states: older name of ``load_optimizer``.
        unsafe_user_content: whether to load objects of any class, which may run code of the file.
        model, optimizer: the model and optimizer to load into, if several are wrapped.

    Returns:
        the user content; for a whole model, that of its file; ``{}`` if none was saved.

    Raises:
        FileNotFoundError: there is no such checkpoint; the text names the existing ones.
        RuntimeError: it does not fit the model; raised at once, or where the model is partitioned.
        ValueError: arguments are invalid, or differ between ranks; the user content has objects
            that are not data.
        PeerFailure: not all ranks have called this.
    """
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states
    current = runtime.current()
    error: BaseException | None = None
    store: JobStore | None = None
    try:
        wrapped = current.wrapped.model if model is None else model
        if not isinstance(wrapped, DistributedModel):
            raise ValueError("wrap the model in smp.DistributedModel first")
        model = wrapped
        if store_names.is_address(path):
            if not partial:
                raise ValueError(f"whole models are read from folders, not from {path}")
            store = store_of(current, os.fspath(path))
    except (RuntimeError, ValueError, ImportError) as caught:
        error = caught
    call = {
        "path": os.fspath(path),
        "tag": tag,
        "partial": partial,
        "strict": strict,
        "load_optimizer": load_optimizer,
        "load_sharded_optimizer_state": load_sharded_optimizer_state,
        "SMP_STORE_PER_HOST": current.rank.settings.store_per_host,
        "error": None if error is None else str(error),
    }
    snippet = f"user_content = smp.resume_from_checkpoint(path, tag={tag!r}, partial={partial})"
    roll_call(current.rank, WHAT, call, snippet)
    assert isinstance(model, DistributedModel)
    if not partial:
        whole = WholeModel(strict, translate_function, current.rank)
        content = together(
            current.rank, WHAT, lambda: whole.open(Path(path), tag, unsafe_user_content)
        )
        when_partitioned(current.rank, model, whole.fill)
        return content
    lockstep = lockstep_of(current.rank)
    is_sharded = lockstep is not None and lockstep.is_forward
    wants_state = load_optimizer and (load_sharded_optimizer_state or not is_sharded)
    resumption = _Resumption(current, strict, load_optimizer, wants_state)
    found = None if store is None else store.find(tag, WHAT)

    def read() -> Any:
        source = folders.find(Path(path), tag) if found is None else found
        return resumption.open(source, unsafe_user_content)

    content = together(current.rank, WHAT, read)
    resumption.begin(model, optimizer)
    return content


def when_partitioned(
    rank: Rank, model: DistributedModel, fill: Callable[[DistributedModel], None]
) -> None:
    """Fills a model as soon as it has its parts, before hooks of users. Collective.

    If there are several calls, the last one wins.
    """

    def run(partitioned: DistributedModel, _: Any = None) -> None:
        together(rank, WHAT, functools.partial(fill, partitioned))

    if model.partitioned:
        run(model)
        return
    handle = model.register_post_partition_hook(run)
    waiting = _waiting.setdefault(model, [])
    waiting.append(handle.id)
    for known in reversed(waiting):
        model._post_partition_hooks.move_to_end(known, last=False)


@dataclass
class _Resumption:
    """A call for a partial checkpoint, until all of it is loaded."""

    current: runtime.Runtime
    strict: bool
    wants_optimizer: bool  # hyperparameters, loss scale, random states
    wants_state: bool  # state of the optimizer

    def open(self, source: Path | Fetched, unsafe: bool) -> Any:
        """Reads the manifest and returns the user content. Not collective.

        Args:
            source: a complete folder, or a folder that fetches files on demand.
            unsafe: whether to load objects of any class.
        """
        folder, get = (source, None) if isinstance(source, Path) else (source.folder, source.get)
        self._reader = FolderReader(folder, get)
        self._get, self.manifest = self._reader.get, self._reader.manifest
        # Tensors are checked when they are read.
        for name in (USER_CONTENT_FILE, PARTITION_FILE, self._random_file()):
            if name in self.manifest.files:
                manifests.check_file(self._get(name), self.manifest.files[name])
        content = user_contents.read(self._get(USER_CONTENT_FILE), unsafe)
        for key in self.manifest.values.get("user_content", {}).get("added", ()):
            del content[key]
        return content

    def _random_file(self) -> str | None:
        """Returns the name of this rank's random states; None on another layout.

        A folder that was rewritten without a job has none, either.
        """
        rank = self.current.rank
        is_equal = self.manifest.layout.sizes == rank.sizes and "rng_0.pt" in self.manifest.files
        return f"rng_{rank.global_rank}.pt" if is_equal and self.wants_optimizer else None

    def begin(self, model: DistributedModel, optimizer: DistributedOptimizer | None) -> None:
        """Loads whatever can be loaded now, and schedules the rest. Collective."""
        has = self.manifest.values["has"]
        self._model = weakref.ref(model)
        if self.wants_optimizer:
            self._restore_random_states()
        if has["model"]:
            if not model.partitioned:
                self._take_over_partition(model)
            when_partitioned(self.current.rank, model, self._fill_model)
        if not (has["optimizer"] and self.wants_optimizer):
            return
        found = optimizer if optimizer is not None else model._optimizer()
        if found is not None:
            self._meet(found)
        else:
            self.current.wrapped.on_next_optimizer(self._meet)

    def _fill_model(self, model: DistributedModel) -> None:
        with self._reader as reader:
            fill_model(model, reader, self.strict, self.current.rank)

    def _meet(self, optimizer: Any) -> None:
        """Gives an optimizer its hyperparameters at once, and its state with the partition."""
        model = self._model()
        if model is None:
            return
        scaler = self.manifest.values.get("loss_scaler")
        if scaler is not None and self.current.rank.config.fp16:
            optimizer.loss_scaler.load_state_dict(scaler)
        if self.wants_state:
            names, aliases = canonical_names(model.get_module())
            device = self.current.rank.device
            fill_groups(optimizer, self.manifest, names, aliases, self.strict, device)
        known = weakref.ref(optimizer)

        def fill(partitioned: DistributedModel) -> None:
            last = known()
            if last is not None:
                self._fill_optimizer(last, partitioned)

        when_partitioned(self.current.rank, model, fill)

    def _fill_optimizer(self, optimizer: DistributedOptimizer, model: DistributedModel) -> None:
        state = model_state(model, self.current.rank)
        with self._reader as reader:
            if not self.manifest.values["has"]["model"]:  # otherwise the model has loaded them
                fill_masters(optimizer, reader, state)
            if self.wants_state:
                fill_optimizer(optimizer, reader, state)

    def _take_over_partition(self, model: DistributedModel) -> None:
        told = self.manifest.values.get("partition")
        rank = self.current.rank
        is_equal = self.manifest.layout.sizes["pp"] == rank.sizes["pp"] > 1
        if told is not None and is_equal and rank.config.partition_file is None:
            engine_of(model).partitioning.follow(self._get(PARTITION_FILE), told["chunks"])

    def _restore_random_states(self) -> None:
        rank, steps = self.current.rank, self.manifest.values["steps"]
        self.current.steps.num_finished = steps["done"]
        self.current.steps.num_begun = steps["begun"]
        self.current.steps.dropout_seed = self.manifest.values.get("dropout_seed")
        name = self._random_file()
        if name is not None:
            file = self._get(name)
            given_files.check_regular(file)
            states = torch.load(file, map_location="cpu", weights_only=True)
            random_states.restore(states, rank.device)
        else:
            seed = self.manifest.values["seed"]
            random_states.seed_anew(
                seed,
                steps["begun"],
                rank.global_rank,
                drops_alike=self.current.steps.dropout_seed is not None,
            )
