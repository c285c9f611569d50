"""Keeps a copy of the state of each rank in the memory of another one (``redundancy``).

A copy is of the moment at which a step function returns: the state, the gradients and the result.
With it a process repeats what the script of a lost rank did since then, wherever that has died. See
docs/design/going_on.md.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.world import host_objects, runtime
from smp.world.device_numbers import NumbersBetweenSteps, Ranks
from smp.world.log import first_rank_log


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


class Copies:
    """Exchanges copies at the end of each step, and keeps the last of those that all ranks have.

    Two copies have room, so that a copy is whole until all ranks have the next one.

    Args:
        current: the runtime.
        state_after: returns the state of this rank when a step function returns, from the runtime,
            the function's name, its result, the packed content of the script, and whether that is
            the content after the call before, too.
        content: packed content after the last call; empty: there was none.

    Attributes:
        numbers: ranks and result of each gathering of this rank from the last finished step until
            the present one.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        state_after: Callable[[runtime.Runtime, str, Any, bytes, bool], Any],
        content: bytes = b"",
    ) -> None:
        self._current, self._state_after = current, state_after
        self._content = self._next_content = content
        self._own = self._next = self._last = torch.empty(0, dtype=torch.uint8)
        self._sizes = self._next_sizes = (0, 0)
        self.numbers: list[tuple[Ranks, Tensor]] = []
        self._num_shown = 0

    @property
    def kept(self) -> KeptCopy | None:
        """The copy at this rank; None: a step has to finish first."""
        num_head, num_all = self._sizes
        if not num_all:
            return None
        head = ctypes.string_at(self._last.data_ptr(), num_head)
        return KeptCopy(head, self._last[num_head:num_all])

    def begin(self) -> None:
        """Notes that a step begins. May be called again when it is repeated."""
        rank = self._current.rank
        if rank.between is not None:
            rank.between.end(rank)
            self.numbers, rank.between = rank.between.gathered, None

    def exchange(self, name: str, result: Any) -> None:
        """Sends this rank's copy to its keeper, and receives another one. Collective.

        Args:
            name: name of the step function that returns.
            result: result of that call.
        """
        rank = self._current.rank
        group, timeout_s = rank.comms.everyone, rank.timeout_s
        assert group is not None
        head, parts = self._pack(name, result)
        parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8), *parts]
        own = torch.tensor([len(head), sum(part.numel() for part in parts)])
        sizes = torch.empty(2 * rank.world_size, dtype=torch.int64)
        group.all_gather(sizes, own).wait(timeout_s)
        num_bytes: list[int] = sizes[1::2].tolist()
        keeper, ward = rank.keepers[rank.global_rank], rank.keepers.index(rank.global_rank)
        self._own = _with_room(self._own, num_bytes[rank.global_rank])
        self._next = _with_room(self._next, num_bytes[ward])
        sent, received = [0] * rank.world_size, [0] * rank.world_size
        sent[keeper], received[ward] = num_bytes[rank.global_rank], num_bytes[ward]
        filled = self._own[: sent[keeper]]
        torch.cat(parts, out=filled)
        group.all_to_all_v(self._next[: received[ward]], filled, received, sent).wait(timeout_s)
        self._next_sizes = int(sizes[2 * ward]), num_bytes[ward]
        self._show(sum(num_bytes), max(num_bytes))

    def _pack(self, name: str, result: Any) -> tuple[bytes, list[Tensor]]:
        current = self._current
        assert current.content_to_give is not None
        try:
            self._next_content = host_objects.pack(current.content_to_give())
            is_same = self._next_content == self._content
            return host_objects.pack_apart(
                self._state_after(current, name, result, self._next_content, is_same)
            )
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            raise RuntimeError(
                f"{_C.rank_prefix()}redundancy=1: the state after step '{name}' cannot be copied "
                f"({error}); return tensors without graphs, numbers and texts from the step "
                "function, and give smp.take_over such content"
            ) from error

    def _show(self, num_all: int, num_most: int) -> None:
        if num_all > 1.01 * self._num_shown:  # moments come with the first update
            self._num_shown = num_all
            first_rank_log.info(
                "smp: redundancy: after each step the ranks keep copies of %d bytes, at most %d at "
                "one (keepers of ranks 0, 1, ...: %s)",
                num_all,
                num_most,
                self._current.rank.keepers,
            )

    def commit(self) -> None:
        """Notes that all ranks have finished the step, hence have its copies."""
        self._last, self._next = self._next, self._last
        self._sizes, self.numbers = self._next_sizes, []
        self._content = self._next_content
        self._current.rank.between = NumbersBetweenSteps()


def _with_room(memory: Tensor, num_bytes: int) -> Tensor:
    return memory if memory.numel() >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)


class StateIsLost(Exception):
    """Reports that neither a rank nor the keeper of its copy has its state."""


def copy_of(current: runtime.Runtime, lost: int) -> KeptCopy:
    """Returns the copy of a lost rank's state, in the rank that keeps it.

    Raises:
        StateIsLost: this rank has taken a place itself since the last finished step.
    """
    kept: KeptCopy | None = None if current.copies is None else current.copies.kept
    if kept is None:
        raise StateIsLost(
            f"{_C.rank_prefix()}rank {lost} is lost, and this rank, the keeper of its copy, has "
            "not finished a step since it was started; resume from a checkpoint"
        )
    return kept
