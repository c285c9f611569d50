"""Writes a partial checkpoint: the part of each rank."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from smp import _version
from smp.checkpoint import archive, file_system, folder, huggingface, random_states
from smp.checkpoint import manifest as manifests
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.entries import ModelState, model_state
from smp.checkpoint.handle import SaveHandle
from smp.checkpoint.locks import OwnerLock
from smp.checkpoint.manifest import Block, Layout, Manifest, Piece, StoredEntry
from smp.checkpoint.partial_files import PlannedFile, RankState, plan_files, sharded_names
from smp.checkpoint.staging import LaterCopies, Staging
from smp.checkpoint.store.job import JobStore
from smp.checkpoint.store.names import Key
from smp.model import DistributedModel, engine_of
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.partition import partition_file
from smp.world.rank import Rank
from smp.world.roll_call import agree
from smp.world.steps import Steps

WHAT = "smp.save_checkpoint"
PARTITION_FILE = "partition.txt"
USER_CONTENT_FILE = "user_content.pt"
_POLL_S = 0.01
_CHUNK_BYTES = 4 << 20


class _OthersFailed(RuntimeError):
    """Raised if a save ends because of another rank, which has raised the reason."""


class PartialSave:
    """The part of this rank in a generation of ``<tag>_partial``. Construction is collective.

    Args:
        path, tag, model, optimizer, user_content: see :func:`smp.save_checkpoint`.
        generation: name of the :class:`folder.Generation`.
        num_kept: number of partial checkpoints that stay; None: all.
        staging: memory for copies of this rank's state, for :meth:`run_in_background`; None: for
            :meth:`run`.
        rank, steps: rank and steps of this process.
        store: store that gets the complete checkpoint; None: it stays in the folder.
    """

    def __init__(
        self,
        path: Path,
        tag: str,
        model: DistributedModel | None,
        optimizer: DistributedOptimizer | None,
        user_content: Any,
        generation: str,
        num_kept: int | None,
        staging: Staging | None,
        rank: Rank,
        steps: Steps,
        store: JobStore | None = None,
    ) -> None:
        self._rank, self._steps, self._store = rank, steps, store
        self._is_first = rank.global_rank == 0
        self._num_kept = num_kept
        self._optimizer = None if optimizer is None else optimizer.optimizer
        name = tag.removesuffix(folder.PARTIAL_SUFFIX) + folder.PARTIAL_SUFFIX
        self._key = Key(generation, name)
        self._store_lock: OwnerLock | None = None  # held by the first rank
        self._content: dict[str, Callable[[Path], None]] = {}  # small files of the first rank
        self._generation = self._open(path, name, generation)
        error: BaseException | None = None
        try:
            self._collect(model, optimizer, user_content)
            # Before the ranks agree, so that no rank's writer delays another's copies.
            self._copies = None if staging is None else self._stage(staging)
        except Exception as caught:
            error = caught
        self._agreed(error)

    def _open(self, path: Path, name: str, generation: str) -> folder.Generation:
        opened: folder.Generation | None = None
        for makes in (True, False):
            error: BaseException | None = None
            try:
                if makes and self._is_first:
                    opened = folder.Generation.begin(path, name, generation)
                elif not makes and not self._is_first:
                    opened = folder.Generation.join(path, name, generation)
            except Exception as caught:
                error = caught
            try:
                agree(self._rank, WHAT, error)
            except Exception:
                if opened is not None:
                    opened.abandon()
                raise
        assert opened is not None
        return opened

    def _collect(
        self,
        model: DistributedModel | None,
        optimizer: DistributedOptimizer | None,
        user_content: Any,
    ) -> None:
        """Plans the files and values that this rank writes."""
        named = model
        if named is None:
            assert optimizer is not None
            (named,) = optimizer._models()
        rank = self._rank
        state = model_state(named, rank.ranks["pp"])
        self._state = plan_files(state, optimizer, model is not None, rank)
        random = random_states.capture(rank.device)
        self._state.files.append(PlannedFile(f"rng_{rank.global_rank}.pt", random))
        if self._is_first:
            self._add_of_first(state, named, model, optimizer, user_content)

    def _add_of_first(
        self,
        state: ModelState,
        named: DistributedModel,
        model: DistributedModel | None,
        optimizer: DistributedOptimizer | None,
        user_content: Any,
    ) -> None:
        values = self._state.values
        names = {}
        if not state.shows_values and optimizer is not None:
            names = sharded_names(state, self._state.flat_groups)
        content, added = with_sharded_names(user_content, names)
        values["user_content"] = {"added": added, "is_none": user_content is None}
        values["aliases"] = state.aliases
        values["has"] = {"model": model is not None, "optimizer": optimizer is not None}
        values["steps"] = {"done": self._steps.num_finished, "begun": self._steps.num_begun}
        values["seed"] = torch.initial_seed()
        values["dropout_seed"] = self._steps.dropout_seed
        values["registrations"] = [
            [registration.family, registration.module_cls.__name__]
            for registration in engine_of(named).registrations
            if registration.family is not None
        ]
        generation = self._generation.generation
        self._content[USER_CONTENT_FILE] = lambda path: user_contents.write(
            path, content, generation
        )
        config = huggingface.config_of(named.get_module())
        if config is not None:
            self._content[huggingface.CONFIG] = lambda path: file_system.write_file(
                path, config.encode(), generation
            )
        decision = named._decision
        if decision is not None and self._rank.sizes["pp"] > 1:
            values["partition"] = {"chunks": decision.num_chunks}
            self._content[PARTITION_FILE] = lambda path: partition_file.write(decision, path)

    # ---- writing

    def run(self) -> None:
        """Writes, and waits until the checkpoint has its name."""
        error: BaseException | None = None
        try:
            self._write(lambda _: None)
        except Exception as caught:
            error = caught
        self._agreed(error)
        try:
            if self._is_first:
                self._commit()
        except Exception as caught:
            error = caught
        self._agreed(error)
        self._send()

    def _agreed(self, error: BaseException | None) -> None:
        try:
            agree(self._rank, WHAT, error)
        except Exception:
            self._generation.abandon()
            raise

    def _stage(self, staging: Staging) -> LaterCopies:
        """Copies this rank's state, except most of the optimizer's, which is copied later."""
        staging.begin()
        self._state.files = [file.staged(staging) for file in self._state.files]
        return staging.end()

    def run_in_background(self, begin_s: float) -> SaveHandle:
        """Copies the rest and writes, in a thread; an optimizer's update waits for the copies.

        Args:
            begin_s: time at which the user's call began, by `time.monotonic`, in seconds.
        """
        copies = self._copies
        assert copies is not None
        hook: RemovableHandle | None = None
        if self._optimizer is not None:
            # The hook is on the wrapped optimizer, which scripts may step directly.
            hook = self._optimizer.register_step_pre_hook(lambda *_: copies.wait())

        def work(progress: Callable[[int], None]) -> None:
            self._work(copies, progress)

        def over() -> None:
            if hook is not None:
                hook.remove()
            self._generation.abandon()

        try:
            total_bytes = _bytes_of(self._state)
            return SaveHandle(
                work, total_bytes, over, begin_s, lambda: copies.waited_s, self._rank.device
            )
        except BaseException:  # there is no thread to copy
            over()
            raise

    def _work(self, copies: LaterCopies, progress: Callable[[int], None]) -> None:
        """Copies, writes and commits; ranks communicate through the folder only."""
        generation = self._generation
        try:
            copies.make()
            self._write(progress)
            if self._is_first:
                self._wait_for(lambda: generation.parts(self._rank.world_size) is not None)
                self._commit()
        except _OthersFailed:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            generation.part_failed(self._rank.global_rank, reason)
            raise RuntimeError(f"global_rank {self._rank.global_rank}: {reason}") from error
        if not self._is_first:
            self._wait_for(generation.is_over)
            if not generation.committed():
                raise RuntimeError("the first rank has failed; its error has the reason")
        self._send()

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._rank.timeout_s
        board = self._rank.board
        while not happened():
            for rank, reason in self._generation.failures().items():
                raise _OthersFailed(f"global_rank {rank}: {reason}")
            fault = None if board is None else board.fault_text()
            if fault is not None:
                raise _OthersFailed(fault)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._generation.folder} did not receive the parts of all ranks within "
                    f"{self._rank.timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def _write(self, progress: Callable[[int], None]) -> None:
        piece = Piece(values=self._state.values)
        target, before = self._generation.folder, 0
        for name, write in self._content.items():
            write(target / name)
            piece.files[name] = manifests.record_of(target / name)
        for file in self._state.files:
            start = before

            def told(num_bytes: int, start: int = start) -> None:
                progress(start + num_bytes)

            options = archive.WriteOptions(chunk_bytes=_CHUNK_BYTES, progress=told)
            written = archive.write(target / file.name, file.content, options)
            before += written.record.num_bytes
            piece.files[file.name] = written.record
            add_blocks(piece, file, written)
        progress(before)
        self._generation.part_done(self._rank.global_rank, piece.to_json())

    def _commit(self) -> None:
        parts = self._generation.parts(self._rank.world_size)
        assert parts is not None
        manifest = Manifest.assemble(
            self._generation.generation,
            versions(),
            Layout(self._rank.config.to_dict(), dict(self._rank.sizes)),
            [Piece.from_json(part, f"part_{rank}.json") for rank, part in enumerate(parts)],
        )
        hold = None if self._store is None else self._hold
        try:
            self._generation.commit(manifest, self._num_kept, when_complete=hold)
        except BaseException:
            if self._store is not None and self._store_lock is not None:
                self._store.let_go(self._key, self._store_lock)
            raise

    def _hold(self, source: Path) -> None:
        assert self._store is not None
        self._store_lock = self._store.hold(source, self._key)

    def _send(self) -> None:
        """Sends the checkpoint, which is complete in its folder, to the store."""
        if self._store is not None:
            self._store.send(self._key, self._store_lock, self._num_kept)


def with_sharded_names(content: Any, names: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Adds the names that public scripts need to merge sharded parameters to the user's content.

    Returns:
        the content, and the keys that were added.
    """
    content = {} if content is None else content
    if not names:
        return content, []
    if not isinstance(content, Mapping):
        raise ValueError(
            "user_content must be a dict with sharded data parallelism, because the names of "
            f"buffers and parameters are added to it; it is a {type(content).__name__}"
        )
    added = [key for key in names if key not in content]
    return {**content, **{key: names[key] for key in added}}, added


def add_blocks(piece: Piece, file: PlannedFile, written: archive.Written) -> None:
    """Adds the places of a file's entries to a piece."""
    offsets = {place.keys: place.offset for place in written.places}
    for place in file.places:
        entry = place.entry
        dtype = str(entry.tensor.dtype).removeprefix("torch.")
        offset = offsets[place.path] + place.offset * entry.tensor.element_size()
        stored = piece.entries.setdefault(entry.name, StoredEntry(dtype, entry.shape, []))
        stored.blocks.append(Block(file.name, offset, entry.part))


def versions() -> dict[str, str]:
    """Returns the versions of smp, torch and Python, for users."""
    return {
        "smp": _version.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _bytes_of(state: RankState) -> int:
    return sum(
        place.entry.tensor.numel() * place.entry.tensor.element_size()
        for file in state.files
        for place in file.places
    )
