"""Keeps a copy of the state of each rank in the memory of another one (``redundancy``).

A copy is of the moment at which a step function returns: the state, the gradients and the result.
With it a process repeats what the script of a lost rank did since then, wherever that has died. See
docs/design/going_on.md.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.step.copy_memory import Exchanged, KeptCopy, SentCopies, SharedCopies, StateIsLost
from smp.world import host_objects, runtime
from smp.world.between_steps import BetweenSteps, Known, Notes
from smp.world.log import first_rank_log


class Copies:
    """Exchanges copies at the end of each step, and keeps the last of those that all ranks have.

    Args:
        current: the runtime.
        state_after: returns the state of this rank when a step function returns, from the runtime,
            the function's name, its result, the packed content of the script, and whether that is
            the content after the call before, too.
        go_on: see `BetweenSteps`.
        content: packed content after the last call; empty: there was none.

    Attributes:
        noted: notes of all ranks about the time since the last finished step, after a failure.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        state_after: Callable[[runtime.Runtime, str, Any, bytes, bool], Any],
        go_on: Callable[[RuntimeError], None],
        content: bytes = b"",
    ) -> None:
        self._current, self._state_after, self._go_on = current, state_after, go_on
        self._content = self._next_content = content
        self._way = self._first_way()
        self._next: Exchanged | None = None
        self._last: Exchanged | None = None
        self._between: BetweenSteps | None = None
        self.noted: list[Notes | None] = []
        self._num_shown = 0

    @property
    def kept(self) -> KeptCopy | None:
        """The copy at this rank; None: a step has to finish first."""
        return None if self._last is None else self._last.read()

    @property
    def notes(self) -> Notes:
        """Notes of this rank about the time since the last finished step."""
        return Notes() if self._between is None else self._between.notes

    def _first_way(self) -> SharedCopies | SentCopies:
        return SharedCopies() if self._current.rank.settings.shared_memory else SentCopies()

    def join_groups(self) -> None:
        """Begins as processes that have taken places do. Not collective."""
        self._way = self._first_way()

    def begin(self) -> None:
        """Notes that a step begins. May be called again when it is repeated."""
        rank = self._current.rank
        if rank.between is not None:
            rank.between.end(rank)
            rank.between = None

    def exchange(self, name: str, result: Any) -> bool:
        """Brings this rank's copy to its keeper, and gets another one. Collective.

        Args:
            name: name of the step function that returns.
            result: result of that call.

        Returns:
            whether the ranks have met: all of them have their copies if one has.
        """
        rank = self._current.rank
        head, memory = self._pack(name, result)
        parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8), *memory]
        self._next = self._way.exchange(rank, len(head), parts)
        if self._next is None:
            first_rank_log.info("smp: redundancy: copies are sent, as ranks share no memory")
            self._way = SentCopies()
            self._next = self._way.exchange(rank, len(head), parts)
        self._show(sum(self._next.num_bytes), max(self._next.num_bytes))
        return isinstance(self._way, SharedCopies)

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
        self._way.commit()
        self._last, self._content = self._next, self._next_content
        self._begin_between()

    def _begin_between(self) -> BetweenSteps:
        self._between = self._current.rank.between = BetweenSteps(self._go_on)
        return self._between

    def repeat_between(self, known: Known) -> None:
        """Notes that this process repeats what the script does after the last finished step.

        Args:
            known: knowledge of the other ranks about that.
        """
        self._begin_between().resume(self._current.rank, known)


def copy_of(current: runtime.Runtime, lost: int) -> KeptCopy:
    """Returns the copy of a lost rank's state, in the rank that keeps it.

    Raises:
        StateIsLost: this rank has taken a place itself since the last finished step, or the lost
            one has written another copy since.
    """
    kept: KeptCopy | None = None if current.copies is None else current.copies.kept
    if kept is None:
        raise StateIsLost(
            f"{_C.rank_prefix()}rank {lost} is lost, and this rank, the keeper of its copy, has "
            "not finished a step since it was started; resume from a checkpoint"
        )
    return kept
