"""Brings copies of states to the ranks that keep them.

On one machine a rank writes its copy into memory that its keeper has mapped, so it is written once
and read only after a loss. Elsewhere copies are sent. Both keep the copy of the last finished step
until all ranks have the next one. See docs/design/going_on.md.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import smp._C as _C
from smp.world.rank import Rank


class StateIsLost(Exception):
    """Reports that neither a rank nor the keeper of its copy has its state."""


@dataclass(frozen=True)
class KeptCopy:
    """A copy of a rank's state.

    Attributes:
        head: state without the memory of its tensors.
        memory: memory of these tensors, uint8 ``[n]``.
    """

    head: bytes
    memory: Tensor

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.memory.numel()


@dataclass(frozen=True)
class Exchanged:
    """The end of an exchange, on each rank.

    Attributes:
        read: returns the copy that this rank has received.
        num_bytes: bytes of the copy of each rank, index = global rank.
    """

    read: Callable[[], KeptCopy]
    num_bytes: list[int]


def _cut(memory: Tensor, num_head: int) -> KeptCopy:
    return KeptCopy(memory[:num_head].numpy().tobytes(), memory[num_head:])


def _gather(rank: Rank, words: Sequence[int]) -> list[list[int]]:
    """Returns the words of each rank. Collective over all."""
    group = rank.comms.everyone
    assert group is not None
    gathered = torch.empty(rank.world_size * len(words), dtype=torch.int64)
    group.all_gather(gathered, torch.tensor(words)).wait(rank.timeout_s)
    found: list[list[int]] = gathered.view(rank.world_size, len(words)).tolist()
    return found


class SentCopies:
    """Sends copies in messages."""

    def __init__(self) -> None:
        nothing = torch.empty(0, dtype=torch.uint8)
        self._own, self._next, self._last = nothing, nothing, nothing

    def exchange(self, rank: Rank, num_head: int, parts: Sequence[Tensor]) -> Exchanged:
        """Sends a copy to its keeper, and receives another one. Collective over all ranks.

        Args:
            rank: calling rank.
            num_head: bytes of the head.
            parts: head and memory of the copy, uint8 ``[n]`` each, to be put behind each other.
        """
        group, own = rank.comms.everyone, rank.global_rank
        assert group is not None
        told = _gather(rank, [num_head, sum(part.numel() for part in parts)])
        num_bytes = [num_all for _, num_all in told]
        keeper, ward = rank.keepers[own], rank.keepers.index(own)
        self._own = _with_room(self._own, num_bytes[own])
        self._next = _with_room(self._next, num_bytes[ward])
        sent, received = [0] * rank.world_size, [0] * rank.world_size
        sent[keeper], received[ward] = num_bytes[own], num_bytes[ward]
        filled, copy = self._own[: num_bytes[own]], self._next[: num_bytes[ward]]
        torch.cat(list(parts), out=filled)
        group.all_to_all_v(copy, filled, received, sent).wait(rank.timeout_s)
        num_head = told[ward][0]
        return Exchanged(lambda: _cut(copy, num_head), num_bytes)

    def commit(self) -> None:
        """Notes that all ranks have the copies of the last exchange."""
        self._last, self._next = self._next, self._last


def _with_room(memory: Tensor, num_bytes: int) -> Tensor:
    return memory if memory.numel() >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)


class _File:
    """A file without a name, which its maker and the keeper of its copies map.

    Attributes:
        fd: descriptor in the process that has made it.
        token: number that the file begins with.
        room: memory for a copy, uint8 ``[n]``.
    """

    _HEAD = 64  # bytes: the token, and the number of the copy that is whole

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        memory = torch.frombuffer(mmap.mmap(fd, self._HEAD + num_bytes), dtype=torch.uint8)
        self._words, self.room = memory[: self._HEAD].view(torch.int64), memory[self._HEAD :]

    @classmethod
    def make(cls, num_bytes: int) -> _File:
        num_bytes += num_bytes // 8 + 4096  # the head grows with the script's content
        fd = os.memfd_create("smp-copy", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls._HEAD + num_bytes)
        made = cls(fd, num_bytes)
        weakref.finalize(made, os.close, fd)
        made._words[0] = secrets.randbits(62) + 1
        return made

    @classmethod
    def open(cls, pid: int, fd: int, token: int, num_bytes: int) -> _File | None:
        """Maps a file of another process; None: it is not in reach, as on another machine."""
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = cls(own, num_bytes)
        except (OSError, ValueError):
            return None
        finally:
            os.close(own)
        return found if found.token == token else None

    @property
    def token(self) -> int:
        return int(self._words[0])

    @property
    def number(self) -> int:
        """Number of the copy that is whole in this file; 0: one is being written."""
        return int(self._words[1])

    def write(self, number: int, parts: Sequence[Tensor]) -> None:
        self._words[1] = 0
        torch.cat(list(parts), out=self.room[: sum(part.numel() for part in parts)])
        self._words[1] = number


@dataclass(frozen=True)
class _Words:
    """A rank's words about its copy, and about the files that it has mapped.

    Attributes:
        num_head, num_all: bytes of its head, and of all of it.
        number: number of the copy.
        slot: file of two that it is in.
        pid, fd, token, num_room: place, token and size of that file.
        mapped, mapped_too: tokens of the files of another rank that this one has mapped, by slot.
    """

    num_head: int
    num_all: int
    number: int
    slot: int
    pid: int
    fd: int
    token: int
    num_room: int
    mapped: int
    mapped_too: int


class SharedCopies:
    """Writes copies into memory of which the keeper maps the same pages.

    Two files take turns. A keeper maps a file when it is new to it; then all ranks wait for it, so
    that no rank that has finished a step may have a copy out of reach of its keeper.
    """

    def __init__(self) -> None:
        self._own: list[_File | None] = [None, None]
        self._theirs: list[_File | None] = [None, None]
        self._slot = self._number = 0

    def exchange(self, rank: Rank, num_head: int, parts: Sequence[Tensor]) -> Exchanged | None:
        """Writes a copy for its keeper, and learns where another one is. Collective over all ranks.

        Args:
            rank: calling rank.
            num_head: bytes of the head.
            parts: head and memory of the copy, uint8 ``[n]`` each, to be put behind each other.

        Returns:
            what was exchanged; None on all ranks: some of them share no memory.
        """
        num_all = sum(part.numel() for part in parts)
        own = self._with_room(num_all)
        self._number += 1
        own.write(self._number, parts)
        mapped = [0 if file is None else file.token for file in self._theirs]
        words = _Words(
            num_head, num_all, self._number, self._slot, os.getpid(), own.fd, own.token,
            own.room.numel(), *mapped,
        )  # fmt: skip
        told = [_Words(*each) for each in _gather(rank, list(vars(words).values()))]
        theirs = told[rank.keepers.index(rank.global_rank)]
        if any(_is_new(each, told[rank.keepers[r]]) for r, each in enumerate(told)):
            if not self._map(rank, theirs):
                return None
        file = self._theirs[theirs.slot]
        assert file is not None
        return Exchanged(lambda: _read(file, theirs), [each.num_all for each in told])

    def _with_room(self, num_bytes: int) -> _File:
        own = self._own[self._slot]
        if own is None or own.room.numel() < num_bytes:
            own = self._own[self._slot] = _File.make(num_bytes)
        return own

    def _map(self, rank: Rank, theirs: _Words) -> bool:
        """Maps a file that is new, and returns whether all ranks could. Collective over all."""
        known = self._theirs[theirs.slot]
        if known is None or known.token != theirs.token:
            known = _File.open(theirs.pid, theirs.fd, theirs.token, theirs.num_room)
            self._theirs[theirs.slot] = known
        return all(has_mapped for (has_mapped,) in _gather(rank, [int(known is not None)]))

    def commit(self) -> None:
        """Notes that all ranks have the copies of the last exchange."""
        self._slot = 1 - self._slot


def _is_new(own: _Words, keeper: _Words) -> bool:
    return own.token != (keeper.mapped, keeper.mapped_too)[own.slot]


def _read(file: _File, words: _Words) -> KeptCopy:
    """Returns a copy of a rank that is lost.

    Raises:
        StateIsLost: the rank was stopped and has gone on alone, and has written another copy.
    """
    found = _cut(file.room[: words.num_all].clone(), words.num_head)
    if file.number != words.number:
        raise StateIsLost(
            f"{_C.rank_prefix()}the memory with the copy of a lost rank has another copy than that "
            "of the last finished step; resume from a checkpoint"
        )
    return found
