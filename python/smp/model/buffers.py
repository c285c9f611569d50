"""Keeps the buffers of all replicas those of the first one."""

from __future__ import annotations

from torch import Tensor, nn

from smp import data_parallel
from smp.world import comm
from smp.world.rank import Rank


class ReplicaBuffers:
    """Broadcasts the first replica's buffers around each training step.

    In front of it all of them, as the script may have written some. Behind it those that forwards
    write (running statistics, codebooks), so that evaluation and checkpoints have the same ones on
    every replica.

    Args:
        rank: of this process.
        root: the user's model.
        broadcasts: whether buffers are broadcast.
    """

    def __init__(self, rank: Rank, root: nn.Module, broadcasts: bool) -> None:
        self._rank, self._root, self._broadcasts = rank, root, broadcasts
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._written: set[str] = set()  # on some replica
        self._num_steps = 0

    @property
    def is_on(self) -> bool:
        """Does a training step that begins now broadcast buffers?"""
        return self._broadcasts and self._root.training

    def begin_step(self, first: int) -> None:
        """Broadcasts all buffers. Collective over the replicas.

        Args:
            first: position of the replica whose buffers count.
        """
        data_parallel.broadcast_from_first(self._rank, list(self._root.buffers()), first=first)
        if self._rank.sizes["dp"] > 1:
            self._before = {name: (b, _version(b)) for name, b in self._root.named_buffers()}

    def end_step(self) -> None:
        """Broadcasts the buffers that forwards write. Collective over the replicas."""
        before, self._before = self._before, {}
        if not before:
            return
        self._num_steps += 1
        # Some are written from a later step on. Each exchange waits for all replicas, so these
        # become rare.
        if self._num_steps & (self._num_steps - 1) == 0:
            own = [name for name, b in self._root.named_buffers() if not _is_same(before, name, b)]
            self._written.update(*comm.allgather(own, comm.DP_GROUP))
        buffers = [b for name, b in self._root.named_buffers() if name in self._written]
        data_parallel.broadcast_from_first(self._rank, buffers)

    def abandon_step(self) -> None:
        """The step has failed. Not collective."""
        self._before = {}


def _is_same(before: dict[str, tuple[Tensor, int]], name: str, buffer: Tensor) -> bool:
    known = before.get(name)
    return known is not None and known[0] is buffer and known[1] == _version(buffer)


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
