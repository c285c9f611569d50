"""Copies the buffers of the first replica to all others."""

from __future__ import annotations

from torch import Tensor, nn

from smp import data_parallel
from smp.world import comm
from smp.world.rank import Rank


class ReplicaBuffers:
    """Broadcasts the first replica's buffers around each training step.

    Before the step all buffers are broadcast, as the script may have written some. After the step
    those that forwards write (running statistics, codebooks) are broadcast, so that evaluation and
    checkpoints have the same ones on every replica.

    Args:
        rank: rank of this process.
        root: the user's model.
        broadcasts: whether buffers are broadcast, if there are several replicas.

    Attributes:
        is_open: whether a step has begun at whose end buffers are broadcast.
    """

    def __init__(self, rank: Rank, root: nn.Module, broadcasts: bool) -> None:
        self._rank, self._root = rank, root
        self._broadcasts = broadcasts
        self.is_open = False
        self._before: dict[str, Tensor] | None = None  # values, in a step that looks for writes
        self._written: set[str] = set()  # names that some replica has written
        self._num_steps = 0

    @property
    def is_on(self) -> bool:
        """True if a training step that begins now broadcasts buffers."""
        return self._broadcasts and self._rank.sizes["dp_cp"] > 1 and self._root.training

    @property
    def marks(self) -> tuple[int, frozenset[str]]:
        """The number of steps, and the names of written buffers; equal on all replicas."""
        return self._num_steps, frozenset(self._written)

    @marks.setter
    def marks(self, marks: tuple[int, frozenset[str]]) -> None:
        self._num_steps, written = marks
        self._written = set(written)

    def begin_step(self, first: int, ends: bool) -> None:
        """Broadcasts all buffers. Collective over the replicas.

        Args:
            first: position of the replica whose buffers count.
            ends: whether all replicas take part in the end of this step.
        """
        data_parallel.broadcast_from_first(self._rank, list(self._root.buffers()), first=first)
        if not ends:
            return
        self.is_open = True
        self._num_steps += 1
        # Some buffers are first written in a later step. The search takes copies and an exchange
        # between replicas, so it becomes rare. PyTorch counts no version of running statistics.
        if self._num_steps & (self._num_steps - 1) == 0:
            self._before = {name: b.detach().clone() for name, b in self._root.named_buffers()}

    def end_step(self) -> None:
        """Broadcasts the buffers that forwards write. Collective over the replicas."""
        now = dict(self._root.named_buffers())
        if self._before is not None and now:
            own = [n for n, b in now.items() if not _is_same(self._before.get(n), b)]
            self._written.update(*comm.allgather(own, comm.CommGroup.DP_CP_GROUP))
        self.abandon_step()
        written = [b for name, b in now.items() if name in self._written]
        data_parallel.broadcast_from_first(self._rank, written)

    def abandon_step(self) -> None:
        """Forgets a step that is over or has failed. Not collective."""
        self.is_open, self._before = False, None


def _is_same(before: Tensor | None, buffer: Tensor) -> bool:
    if before is None or before.shape != buffer.shape or before.dtype != buffer.dtype:
        return False
    return bool(((before == buffer) | ((before != before) & (buffer != buffer))).all())
