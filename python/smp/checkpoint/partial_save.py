"""Writes a partial checkpoint: the part of each rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from smp.checkpoint import archive, file_system, folder, huggingface, random_states
from smp.checkpoint import manifest as manifests
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.entries import model_state
from smp.checkpoint.handle import SaveHandle
from smp.checkpoint.locks import OwnerLock
from smp.checkpoint.manifest import Block, Layout, Manifest, Piece, StoredEntry
from smp.checkpoint.partial_files import PlannedFile, RankState, plan_files, sharded_names
from smp.checkpoint.staging import LaterCopies, Staging
from smp.checkpoint.store.job import JobStore
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.node_parts import NodeParts
from smp.checkpoint.store.nodes import Node
from smp.model import DistributedModel, engine_of
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.partition import partition_file
from smp.storage.parts import ModelState
from smp.world.rank import Rank
from smp.world.roll_call import together
from smp.world.run_record import RunRecord, versions
from smp.world.steps import Steps

WHAT = "smp.save_checkpoint"
PARTITION_FILE = "partition.txt"
USER_CONTENT_FILE = "user_content.pt"
_POLL_S = 0.01
_LEAVE_S = 60.0


class _OthersFailed(RuntimeError):
    """Raised if a save ends because of another rank, which has raised the reason."""


@dataclass
class PartialSave:
    """The part of this rank in a generation of ``<tag>_partial``. Construction is collective.

    Attributes:
        path, tag, model, optimizer, user_content: see :func:`smp.save_checkpoint`.
        generation: name of the :class:`folder.Generation`.
        num_kept: number of partial checkpoints that stay; None: all.
        staging: memory for copies of this rank's state, for :meth:`run_in_background`; None: for
            :meth:`run`.
        rank, steps: rank and steps of this process.
        record: record of the job, which receives the complete checkpoint.
        begin_s: time at which the user's call began, by `time.monotonic`, in seconds.
        store: store that gets the complete checkpoint; None: it stays in the folder.
    """

    path: Path
    tag: str
    model: DistributedModel | None
    optimizer: DistributedOptimizer | None
    user_content: Any
    generation: str
    num_kept: int | None
    staging: Staging | None
    rank: Rank
    steps: Steps
    record: RunRecord
    begin_s: float
    store: JobStore | None = None

    def __post_init__(self) -> None:
        # The rank may get another number while a save runs in the background.
        self._number, self._num_ranks = self.rank.global_rank, self.rank.world_size
        self._sizes, self._board = dict(self.rank.sizes), self.rank.board
        alone = Node.of(self._number, self._num_ranks, None)
        self._node = alone if self.store is None else self.store.node
        self._is_first, self._step = self._number == 0, self.steps.num_finished
        name = self.tag.removesuffix(folder.PARTIAL_SUFFIX) + folder.PARTIAL_SUFFIX
        self._key = Key(self.generation, name)
        self._store_lock: OwnerLock | None = None  # held by the first rank
        self._content: dict[str, Callable[[Path], None]] = {}  # small files of the first rank
        self._folder: folder.Generation | None = None
        try:
            for opens in (self._node.leads, not self._node.leads):  # the others join then
                together(self.rank, WHAT, self._open if opens else _nothing)
            together(self.rank, WHAT, self._plan)
        except Exception:
            self._abandon()
            raise

    @cached_property
    def _parts(self) -> NodeParts:
        """Parts of all ranks, on the first rank of a folder."""
        return NodeParts(
            None if self.store is None else self.store.meeting, self._node, self._writing
        )

    def _open(self) -> None:
        make = folder.Generation.begin if self._node.leads else folder.Generation.join
        self._folder = make(self.path, self._key.name, self.generation)

    def _abandon(self) -> None:
        if self._folder is not None:
            self._folder.abandon()

    @property
    def _writing(self) -> folder.Generation:
        assert self._folder is not None
        return self._folder

    # ---- planning

    def _plan(self) -> None:
        """Plans the files and values that this rank writes, and copies what is to be copied now."""
        named = self.model
        if named is None:
            assert self.optimizer is not None
            (named,) = self.optimizer._models()
        state = model_state(named, self.rank)
        self._state = plan_files(state, self.optimizer, self.model is not None, self.rank)
        random = random_states.capture(self.rank.device)
        self._state.files.append(PlannedFile(f"rng_{self._number}.pt", random))
        if self._is_first:
            self._add_of_first(state, named)
        # Before the ranks agree, so that no rank's writer delays another's copies.
        if self.staging is not None:
            # Most of the optimizer's state is copied later.
            self.staging.begin()
            self._state.files = [file.staged(self.staging) for file in self._state.files]
            self._copies: LaterCopies = self.staging.end()

    def _add_of_first(self, state: ModelState, named: DistributedModel) -> None:
        names = {}
        if not state.storage.shows_values and self.optimizer is not None:
            names = sharded_names(state, self._state.flat_groups)
        content, added = with_sharded_names(self.user_content, names)
        self._state.values |= {
            "user_content": {"added": added, "is_none": self.user_content is None},
            "aliases": state.aliases,
            "has": {"model": self.model is not None, "optimizer": self.optimizer is not None},
            "steps": {"done": self.steps.num_finished, "begun": self.steps.num_begun},
            "seed": torch.initial_seed(),
            "dropout_seed": self.steps.dropout_seed,
            "registrations": [
                [registration.family, registration.module_cls.__name__]
                for registration in engine_of(named).registrations
                if registration.family is not None
            ],
        }
        self._content[USER_CONTENT_FILE] = lambda path: user_contents.write(
            path, content, self.generation
        )
        config = huggingface.config_of(named.get_module())
        if config is not None:
            self._content[huggingface.CONFIG] = lambda path: file_system.write_file(
                path, config.encode(), self.generation
            )
        decision = named._decision
        if decision is not None and self.rank.sizes["pp"] > 1:
            self._state.values["partition"] = {"chunks": decision.num_chunks}
            self._content[PARTITION_FILE] = lambda path: partition_file.write(decision, path)

    # ---- writing

    def run(self) -> None:
        """Writes, and waits until the checkpoint has its name."""
        try:
            together(self.rank, WHAT, self._write)
            together(self.rank, WHAT, self._commit)
        except Exception:
            self._abandon()
            raise
        self._send()

    def run_in_background(self) -> SaveHandle:
        """Copies the rest and writes, in a thread; an optimizer's update waits for the copies."""
        copies = self._copies
        hook: RemovableHandle | None = None
        if self.optimizer is not None:
            # The hook is on the wrapped optimizer, which scripts may step directly.
            hook = self.optimizer.optimizer.register_step_pre_hook(lambda *_: copies.wait())

        def over() -> None:
            if hook is not None:
                hook.remove()
            self._abandon()

        try:
            total_bytes = _bytes_of(self._state)
            return SaveHandle(
                self._work,
                total_bytes,
                over,
                self.begin_s,
                lambda: copies.waited_s,
                self.rank.device,
            )
        except BaseException:  # there is no thread to copy
            over()
            raise

    def _work(self, progress: Callable[[int], None]) -> None:
        """Copies, writes and commits; ranks communicate through the folder only."""
        writing, number = self._writing, self._number
        try:
            self._copies.make()
            self._write(progress)
            self._commit()
        except _OthersFailed:
            self._let_others_leave()
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # the disk may be full
                writing.part_failed(number, reason)
            if self._node.leads:
                self._parts.publish({number: reason})
                self._let_others_leave()
            raise RuntimeError(f"global_rank {number}: {reason}") from error
        if not self._node.leads:
            self._wait_for(writing.is_over)
            if not writing.committed():
                raise RuntimeError("the first rank has failed; its error has the reason")
        self._send()

    def _let_others_leave(self) -> None:
        """Waits until the others in the folder of this first rank know why it will be deleted.

        A rank that still writes comes to know it afterwards.
        """
        others = set(self._node.ranks) - {self._number}
        deadline, board = time.monotonic() + _LEAVE_S, self._board
        with contextlib.suppress(FileNotFoundError):  # the failure came after the renaming
            while self._node.leads and not others <= self._writing.left():
                if time.monotonic() > deadline or (board is not None and board.fault_text()):
                    return
                time.sleep(_POLL_S)

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.rank.timeout_s
        board = self._board
        while not happened():
            if self._node.leads:
                self._parts.publish_failures()
            for rank, reason in self._writing.failures().items():
                self._writing.leave(self._number)
                raise _OthersFailed(f"global_rank {rank}: {reason}")
            fault = None if board is None else board.fault_text()
            if fault is not None:
                raise _OthersFailed(fault)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._writing.folder} did not receive the parts of all ranks within "
                    f"{self.rank.timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def _write(self, progress: Callable[[int], None] = lambda _: None) -> None:
        piece = Piece(values=self._state.values)
        target, before = self._writing.folder, 0
        for name, write in self._content.items():
            write(target / name)
            piece.files[name] = manifests.record_of(target / name)
        for file in self._state.files:

            def told(num_bytes: int, start: int = before) -> None:
                progress(start + num_bytes)

            written = archive.write(
                target / file.name, file.content, archive.WriteOptions(progress=told)
            )
            before += written.record.num_bytes
            piece.files[file.name] = written.record
            add_blocks(piece, file, written)
        progress(before)
        self._writing.part_done(self._number, piece.to_json())

    def _commit(self) -> None:
        """Gives the checkpoint its name. First rank of a folder; the others return at once."""
        if not self._node.leads:
            return
        self._wait_for(lambda: self._parts.are_there(self._num_ranks))
        parts = self._writing.parts(range(self._num_ranks))
        assert parts is not None
        pieces = [Piece.from_json(part, f"part_{rank}.json") for rank, part in enumerate(parts)]
        layout = Layout(self.rank.config.to_dict(), self._sizes)
        manifest = Manifest.assemble(self.generation, versions(), layout, pieces)
        others = (p for rank, p in enumerate(pieces) if rank not in self._node.ranks)
        elsewhere = {name for piece in others for name in piece.files}
        hold = None if self.store is None else self._hold
        try:
            self._writing.commit(manifest, self.num_kept, when_complete=hold, elsewhere=elsewhere)
        except BaseException:
            if self.store is not None and self._store_lock is not None:
                self.store.let_go(self._key, self._store_lock)
            raise
        if not self._is_first:
            return
        num_bytes = sum(record.num_bytes for record in manifest.files.values())
        seconds = time.monotonic() - self.begin_s
        path = self.path / self._key.name
        self.record.saved(path, self.tag, self._step, num_bytes, seconds, self.store)

    def _hold(self, source: Path) -> None:
        assert self.store is not None
        self._store_lock = self.store.hold(source, self._key)

    def _send(self) -> None:
        """Sends the checkpoint, which is complete in its folder, to the store."""
        if self.store is not None:
            self.store.send(self._key, self._store_lock, self.num_kept)


def _nothing() -> None:
    """Waits for the other ranks, which act."""


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


def _bytes_of(state: RankState) -> int:
    return sum(
        place.entry.tensor.numel() * place.entry.tensor.element_size()
        for file in state.files
        for place in file.places
    )
