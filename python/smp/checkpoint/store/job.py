"""Holds the stores that a job uses: one object per address and `smp.init`."""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from smp.checkpoint import folder as folders
from smp.checkpoint import manifest as manifests
from smp.checkpoint.handle import finish_running
from smp.checkpoint.locks import OwnerLock
from smp.checkpoint.store import copies, fetching, names, pending, plan
from smp.checkpoint.store.fetching import Fetched
from smp.checkpoint.store.names import Address, Key
from smp.checkpoint.store.node_parts import NodeFailures
from smp.checkpoint.store.nodes import Node
from smp.checkpoint.store.objects import ObjectStore
from smp.checkpoint.store.pending import Pending
from smp.checkpoint.store.plan import Holding
from smp.checkpoint.store.uploader import Upload, Uploader
from smp.world import runtime
from smp.world.rank import Rank
from smp.world.roll_call import agree, together
from smp.world.run_record import RunRecord

_log = logging.getLogger("smp")
_PATIENCE_S = 120.0
_MOST_PARTS = 2

_stores: weakref.WeakKeyDictionary[runtime.Runtime, dict[Address, JobStore]]
_stores = weakref.WeakKeyDictionary()


class JobStore:
    """The checkpoints of one address, seen from this rank.

    Args:
        address: address of the store.
        rank: rank of this process.
        meeting: store in which the ranks have met; None in a world of one.
        record: record of the job, which receives checkpoints that are in the store.

    Attributes:
        root: folder on this machine in which checkpoints are completed before they are sent.
        node: ranks that share this folder.
        meeting: store in which the ranks have met.
        uploader: sender of complete checkpoints.

    Raises:
        ValueError: the store belongs to one process, and there are several.
        ImportError: a package is missing; the text names it.
    """

    def __init__(
        self, address: Address, rank: Rank, meeting: dist.Store | None, record: RunRecord
    ) -> None:
        if address.protocol == "memory" and rank.world_size > 1:
            raise ValueError(
                f"{address} is in the memory of one process, and this job has {rank.world_size} "
                "ranks; give them a store that all of them reach"
            )
        self._rank, self._address, self.meeting = rank, address, meeting
        hosts = rank.launch.hosts if rank.settings.store_per_host else None
        self.node = Node.of(rank.global_rank, rank.world_size, hosts)
        self._is_first = rank.global_rank == 0
        self.root = names.local_folder(rank.settings.store_root.expanduser(), address)
        self._objects = ObjectStore(address, lambda: self.uploader.is_stopped())
        self._reader = ObjectStore(address)
        self._reading: weakref.WeakSet[Fetched] = weakref.WeakSet()
        self.uploader = Uploader(
            self._objects,
            self.node,
            rank.prefix,
            rank.timeout_s,
            self._fault,
            lambda: {fetched.key for fetched in self._reading},
            lambda key, seconds: record.stored(address, key.name, seconds),
            lambda key: NodeFailures(meeting, self.node, key.generation),
        )
        self._left: list[tuple[Pending, OwnerLock]] | None = None
        self._in_store: list[Holding] = []
        self._has_gone_on = False
        self._last_ns = 0

    # ---- generations left by earlier jobs

    def find_unsent(self) -> list[Holding]:
        """Reads the store and finds unsent generations of ended jobs, the first time.

        Only the first rank of a folder looks, and only before :meth:`go_on`; the result is empty
        otherwise.

        Returns:
            these generations, and incomplete ones of the store if hosts have folders of their own;
            all ranks give those of all to :meth:`go_on`.
        """
        if not self.node.leads or self._has_gone_on:
            return []
        if self._left is None:
            found = self._reader.generations() if self._is_first else []
            self.root.mkdir(parents=True, exist_ok=True)
            self._left = pending.left_by_the_dead(self.root)
            keys = [*found, *local_keys(self.root), *(one.key for one, _ in self._left)]
            self._last_ns = max((int(key.generation[:16], 16) for key in keys), default=0)
            if not self.node.is_alone:
                self._in_store = self._incomplete(found)
        return [*(_holding(one.key, one.folder) for one, _ in self._left), *self._in_store]

    def _incomplete(self, keys: Iterable[Key]) -> list[Holding]:
        """Returns what the store has of generations that are not complete there."""
        stored = (self._reader.stored(key) for key in keys)
        return [Holding(one.key, list(one.sizes), 0) for one in stored if not one.is_complete]

    def go_on(self, left: Sequence[Iterable[Holding]]) -> None:
        """Sends generations that ended jobs have left; on all ranks, with the lists of all.

        The first host that has a part of a generation completes it. Of generations of which files
        are missing, the hosts keep their parts of the newest `_MOST_PARTS`, because the host that
        has the files may come back.
        """
        self._has_gone_on = True
        locks = {one.key: lock for one, lock in self._left or ()}
        whole = plan.covered(one for own in left for one in own)
        waiting = [{one.key for one in own if one.total} for own in left]
        kept = sorted(set.union(*waiting) - whole)[-_MOST_PARTS:]
        for key in sorted(waiting[self.node.leader]):
            one = Pending.of(self.root, key)
            if key in whole:
                if self.node.leads:
                    one.forget_failures()
                completes = not any(key in own for own in waiting[: self.node.leader])
                self.uploader.add(Upload(one, locks.get(key), None, completes))
            elif self.node.leads:
                self._set_aside(Upload(one, locks[key], None), key in kept)

    def _set_aside(self, part: Upload, is_kept: bool) -> None:
        """Keeps or deletes this host's part of a generation of which files are missing."""
        assert part.lock is not None
        key = part.pending.key
        if is_kept:
            self.uploader.keep(part)
        else:
            part.pending.delete()
            part.lock.release(delete=True)
        _log.warning(
            "%s%s cannot be completed in %s: some of its files are neither there nor on a host of "
            "this job. The part of this host (%s) is %s",
            self._rank.prefix,
            key.name,
            self._address,
            part.pending.folder,
            "kept: a job in which the host that has the rest is back goes on from it"
            if is_kept
            else f"deleted, because {_MOST_PARTS} newer ones are kept",
        )

    # ---- saving

    def new_generation(self) -> str:
        """Returns a generation later than all in the store, whatever the clock shows."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return f"{self._last_ns:016x}{secrets.token_hex(4)}"

    def hold(self, source: Path, key: Key) -> OwnerLock:
        """Makes a checkpoint pending before it gets its name. First rank of a folder."""
        return pending.hold(self.root, source, key)[1]

    def let_go(self, key: Key, lock: OwnerLock) -> None:
        """Deletes the pending copy of a checkpoint that did not get its name."""
        Pending.of(self.root, key).delete()
        lock.release(delete=True)

    def send(self, key: Key, lock: OwnerLock | None, keep: int | None) -> None:
        """Sends this rank's share in the background; on all ranks, once the checkpoint is named.

        Args:
            key: key of the checkpoint.
            lock: lock of `hold` on the first rank of a folder, else None.
            keep: number of complete generations that stay in the store; None: all.
        """
        self.uploader.add(Upload(Pending.of(self.root, key), lock, keep, self._is_first))

    # ---- loading

    def find(self, tag: str | None, what: str) -> Path | Fetched:
        """Returns the checkpoint that a job resumes from. Collective.

        Args:
            tag: tag of the checkpoint; None: the newest.
            what: name of the public function, for errors.

        Returns:
            a complete folder, or a folder that fetches files on demand.

        Raises:
            FileNotFoundError: there is no such checkpoint, in the store nor in the folder.
            RuntimeError: the store cannot be read.
        """
        error: BaseException | None = None
        local: list[Holding] = []
        stored: Key | None = None
        left: list[Holding] = []
        try:
            local = [_holding(key, path) for key, path in self._local().items()]
            left = self.find_unsent()
            if self._is_first:
                stored = copies.newest_complete(self._reader, tag)
        except Exception as caught:
            error = caught
        told = agree(self._rank, what, error, (local, stored, left))
        self.go_on([own[2] for own in told])
        stored = told[0][1]
        reports: list[Iterable[Key]] = [[one.key for one in own[0]] for own in told]
        if not self.node.is_alone:
            reports = [plan.covered(one for own in told for one in (*own[0], *own[2]))]
        known = [] if stored is None else [stored]
        found = plan.choose(known, reports, tag, folders.PARTIAL_SUFFIX)
        if found is None:
            asked = "no complete checkpoint" if tag is None else f"no complete checkpoint {tag!r}"
            raise FileNotFoundError(
                f"{self._rank.prefix}{what}: {self._address} has {asked}, nor has {self.root}"
            )
        key, is_local = found
        if is_local and self.node.is_alone:
            return together(self._rank, what, lambda: self.root / key.name)
        return together(self._rank, what, lambda: self._fetched(key, key == stored))

    def _local(self) -> dict[Key, Path]:
        """Returns generations that are in the folder, or parts of them if hosts have their own.

        Those that are pending count only then, because in a shared folder one is sent first.
        """
        found = {key: self.root / key.name for key in local_keys(self.root)}
        if not self.node.is_alone:
            for key in pending.keys(self.root):
                found.setdefault(key, Pending.of(self.root, key).folder)
        return found

    def _fetched(self, key: Key, is_complete: bool) -> Fetched:
        hang_s = self._rank.settings.hang_s
        patience_s = min(_PATIENCE_S, hang_s / 2) if hang_s else _PATIENCE_S
        beside = None if self.node.is_alone else self._local().get(key)
        fetched = Fetched(
            self._reader, key, self.root, patience_s, beside=beside, is_complete=is_complete
        )
        self._reading.add(fetched)
        if self._rank.local_rank == 0:
            fetching.tidy(self.root, key)
        return fetched

    def _fault(self) -> str | None:
        return None if self._rank.board is None else self._rank.board.fault_text()

    def __str__(self) -> str:
        return str(self._address)


def store_of(current: runtime.Runtime, path: str) -> JobStore:
    """Returns the store of an address; makes it the first time. Not collective."""
    address = names.parse(path)
    known = _stores.setdefault(current, {})
    if address not in known:
        if not known:
            current.on_shutdown(lambda: _end(current))
        known[address] = JobStore(address, current.rank, current.meeting, current.record)
    return known[address]


def stores_in_use(current: runtime.Runtime) -> list[JobStore]:
    """Returns the stores that this process has used since `smp.init`."""
    return list(_stores.get(current, {}).values())


def local_keys(root: Path) -> list[Key]:
    """Returns the keys of generations that are complete in a folder."""
    keys = []
    for path in folders.partial_checkpoints(root):
        try:
            key = Key(manifests.generation_of(path), path.name)
        except FileNotFoundError:
            continue  # it is being replaced
        if names.is_ordered(key.generation):
            keys.append(key)
    return keys


def _holding(key: Key, path: Path) -> Holding:
    """Returns the files of a generation that are in a folder."""
    try:
        files = manifests.read(path).files
    except FileNotFoundError:
        return Holding(key, [], 0)  # it was deleted meanwhile
    return Holding(key, [name for name in files if (path / name).is_file()], len(files))


def _end(current: runtime.Runtime) -> None:
    """Waits for the stores at shutdown, unless the job has failed."""
    errors = []
    try:
        finish_running(current)  # a store gets its checkpoint once that has its name
    except RuntimeError as error:
        errors.append(str(error))
    for store in stores_in_use(current):
        try:
            store.uploader.wait(None)
        except RuntimeError as error:
            errors.append(str(error))
        finally:
            store.uploader.stop()
    _stores.pop(current, None)
    if errors:
        raise RuntimeError("; ".join(errors))
