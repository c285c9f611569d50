"""The `torch.distributed` process groups that users get."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import smp._C as _C
from smp.world.connecting import until_a_rank_fails
from smp.world.groups import BATCH_KINDS, SHARD_KINDS, all_groups, backends_for, own_groups
from smp.world.interfaces import INTERFACE_VARIABLE, address_of
from smp.world.process_hooks import keep_forever
from smp.world.rank import Rank

_KINDS = (*BATCH_KINDS, *SHARD_KINDS)
_LOOK_S, _END_S = 0.001, 1.0
_ABANDONED = "these process groups were abandoned, as a rank has failed"


class ProcessGroups:
    """Process groups of one rank: made by `init` with the key ``ddp``, or when asked for.

    Args:
        rank: rank that the groups belong to.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._store: dist.Store | None = None
        self._loopback = True
        self._groups: TorchGroups | None = None

    def open(self, store: dist.Store, *, loopback: bool) -> None:
        """Makes the groups if the configuration has ``ddp``. Collective over all ranks.

        Args:
            store: keys of this init, in a world of more than one.
            loopback: whether all ranks are on one machine.
        """
        self._store, self._loopback = store, loopback
        self.make_if_wanted()

    def make_if_wanted(self) -> None:
        """Makes the groups after a later `init`, which may have added ``ddp``. Collective.

        A world of one makes its groups on first use.
        """
        if self._rank.config.ddp and self._groups is None and self._store is not None:
            self._groups = self._make(self._store)

    def of(self, kind: str) -> dist.ProcessGroup:
        """Returns the group of a kind that this rank belongs to.

        Raises:
            RuntimeError: ``ddp`` is off.
        """
        rank = self._rank
        rank.check_process(f"get_{kind}_process_group")
        if not rank.config.ddp:
            raise RuntimeError(
                f"{rank.prefix}get_{kind}_process_group needs the configuration key ddp, "
                "which is False; pass ddp=True to smp.init"
            )
        if self._groups is None:
            self._groups = self._make(dist.HashStore())
        return self._groups[kind]

    def _make(self, store: dist.Store) -> TorchGroups:
        rank = self._rank
        groups = TorchGroups(
            rank.grid,
            rank.global_rank,
            shard_size=rank.shard_size,
            device=rank.device,
            loopback=self._loopback,
            timeout_s=rank.timeout_s,
        )
        until_a_rank_fails(rank.board, rank.device, lambda: groups.make(store), groups.abandon)
        return groups

    def close(self) -> None:
        """Ends the groups. May be called twice."""
        groups, self._groups, self._store = self._groups, None, None
        if groups is not None:
            groups.destroy()


class TorchGroups:
    """The process groups of a rank."""

    def __init__(
        self,
        grid: _C.ProcessGrid,
        global_rank: int,
        *,
        shard_size: int,
        device: torch.device,
        loopback: bool,
        timeout_s: float,
    ) -> None:
        self._grid, self._global_rank, self._shard_size = grid, global_rank, shard_size
        self._device, self._loopback = device, loopback
        self._timeout = timedelta(seconds=timeout_s)
        self._owns_default = not dist.is_initialized()
        self._excepthooks = [sys.excepthook]
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._by_kind: dict[str, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()  # of the state of torch.distributed
        self._is_abandoned = False

    def make(self, store: dist.Store) -> None:
        """Makes the groups. Collective over all ranks. It may wait for a rank that has failed.

        Args:
            store: keys of these ranks alone.

        Raises:
            RuntimeError: torch.distributed is initialized with another rank or size.
        """
        grid, rank = self._grid, self._global_rank
        if self._owns_default:
            with self._adding():
                dist.init_process_group(
                    backends_for(self._device),
                    store=dist.PrefixStore("torch", store),
                    rank=rank,
                    world_size=grid.world_size,
                    timeout=self._timeout,
                )
                self._excepthooks.append(sys.excepthook)  # torch installs its own
        elif (dist.get_rank(), dist.get_world_size()) != (rank, grid.world_size):
            raise RuntimeError(
                f"torch.distributed is already initialized as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, the launcher says rank {rank} of {grid.world_size}; "
                "initialize it with the launcher's values or leave it to smp.init"
            )
        self._make_all()
        own = own_groups(grid, rank, self._shard_size)
        self._by_kind = {kind: self._by_ranks[own[kind]] for kind in _KINDS}

    def _make_all(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._by_ranks[tuple(range(self._grid.world_size))] = world
        if self._owns_default:
            self._connect_neighbours(world)
        alone = (self._global_rank,)
        if alone not in self._by_ranks:
            self._add(alone, use_local_synchronization=True)
        seen = set(self._by_ranks)
        groups = all_groups(self._grid, self._shard_size)
        for kind in _KINDS:
            for members in groups[kind]:  # every rank makes all, in one order
                ranks = tuple(members)
                if len(ranks) > 1 and ranks not in seen:
                    seen.add(ranks)
                    self._add(ranks)

    def _add(self, ranks: tuple[int, ...], **options: Any) -> None:
        with self._adding():
            group = dist.new_group(ranks, self._timeout, **options)
        if self._global_rank in ranks:
            self._by_ranks[ranks] = group
            self._made.append(group)
            if len(ranks) > 1:
                self._connect_neighbours(group)

    def _connect_neighbours(self, group: dist.ProcessGroup) -> None:
        """Connects each rank of a group to those a power of two away. Collective over the group.

        Rings and trees need no others. If a rank dies, operations of the ranks connected to it end
        at once.
        """
        backend: Any = group._get_backend(torch.device("cpu"))
        work = backend.barrier()
        while not work.is_completed():  # a wait would not end if a rank dies before it connects
            if self._is_abandoned:
                keep_forever(backend)  # its destructor would wait
                raise RuntimeError(_ABANDONED)
            time.sleep(_LOOK_S)
        work.wait()

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Keeps others from the state of torch.distributed. With Gloo nothing waits in it."""
        with self._lock:
            if self._is_abandoned:
                raise RuntimeError(_ABANDONED)
            with _gloo_settings(self._loopback):
                yield

    def abandon(self) -> None:
        """Ends `make`, in which another thread may wait, and what it has made so far.

        No group is added after that, so others can be made.
        """
        self._is_abandoned = True
        if not self._lock.acquire(timeout=_END_S):
            return  # TORCH_GLOO_LAZY_INIT=0 of the user: the other thread waits in torch
        try:
            if self._owns_default:
                self.destroy()
        finally:
            self._lock.release()

    def __getitem__(self, kind: str) -> dist.ProcessGroup:
        return self._by_kind[kind]

    def destroy(self) -> None:
        """Ends the groups that this object made."""
        if not dist.is_initialized():
            return  # the user did it
        if self._owns_default:
            dist.destroy_process_group()
            if sys.excepthook is self._excepthooks[-1]:
                sys.excepthook = self._excepthooks[0]
            return
        for group in self._made:
            dist.destroy_process_group(group)


@contextmanager
def _gloo_settings(loopback: bool) -> Iterator[None]:
    """Sets where torch's own Gloo groups listen and when they connect, unless the user has.

    With lazy initialization two ranks of a group connect in the first operation that needs it. An
    interface that the user has named may have gone with the other hosts.
    """
    before = dict(os.environ)
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if loopback and not address_of(os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]):
        os.environ[INTERFACE_VARIABLE] = "lo"
    try:
        yield
    finally:
        for name in ("TORCH_GLOO_LAZY_INIT", INTERFACE_VARIABLE):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
