"""Lets what ranks do together between two steps survive the loss of one of them.

With copies of states (``redundancy``) each rank notes the numbers that it gathers with others.
After a failure the notes of the ranks that live say what is known of each gathering: numbers that
one of them has are final, and all others read them from memory; those that none of them has are
gathered once more, together with the process that has repeated the script up to there. See
docs/design/going_on.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from smp.world.survivors import HOLD_S

if TYPE_CHECKING:
    from smp.world.rank import Rank

Ranks = tuple[int, ...]


@dataclass
class Notes:
    """Notes of a rank about what it has done with others since the last finished step.

    Attributes:
        gathered: ranks and result of each gathering of numbers.
        num_calls: number of other calls that communicate.
        is_over: whether it has come to the next step.
    """

    gathered: list[tuple[Ranks, Tensor]] = field(default_factory=list)
    num_calls: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class Known:
    """The knowledge of all ranks that live about the time between two steps, for one of them.

    Attributes:
        numbers: results of all gatherings that have one, by the ranks of the group.
        over: ranks that have come to the next step.
        are_all_over: whether all have.
        num_calls: number of other calls that no rank makes again, because one of them has.
    """

    numbers: dict[Ranks, list[Tensor]]
    over: frozenset[int] = frozenset()
    are_all_over: bool = False
    num_calls: int = 0


def known_to(global_rank: int, noted: Sequence[Notes | None]) -> Known:
    """Returns what is known about the groups of a rank.

    Ranks of a group gather the same numbers in one order, and some may have been told fewer. The
    keeper of a copy may be in other groups than the lost rank, so all ranks are asked.

    Args:
        global_rank: the rank.
        noted: notes of each rank, index = global rank; None: a process takes its place.
    """
    numbers: dict[Ranks, list[Tensor]] = {}
    living = {rank: notes for rank, notes in enumerate(noted) if notes is not None}
    for notes in living.values():
        own: dict[Ranks, list[Tensor]] = {}
        for ranks, found in notes.gathered:
            if global_rank in ranks:
                own.setdefault(ranks, []).append(found)
        for ranks, results in own.items():
            if len(results) > len(numbers.get(ranks, ())):
                numbers[ranks] = results
    over = frozenset(rank for rank, notes in living.items() if notes.is_over)
    num_calls = max(notes.num_calls for notes in living.values())
    return Known(numbers, over, len(over) == len(living), num_calls)


class BetweenSteps:
    """The time of a rank from the end of a step to the beginning of the next one.

    Args:
        go_on: goes on after a failure together with all ranks, and calls `resume`; raises its
            argument if that is not the failure of another rank.

    Attributes:
        notes: notes of this rank so far, also about what it has repeated.
    """

    def __init__(self, go_on: Callable[[RuntimeError], None]) -> None:
        self._go_on = go_on
        self.notes = Notes()
        self._known = Known({})
        self._left: dict[Ranks, list[Tensor]] = {}

    def resume(self, rank: Rank, known: Known) -> None:
        """Goes on with what the ranks that live know after a failure.

        Args:
            rank: calling rank, as the ranks are numbered now.
            known: see `known_to`.
        """
        counts = Counter(ranks for ranks, _ in self.notes.gathered)
        self._known = known
        self._left = {ranks: found[counts[ranks] :] for ranks, found in known.numbers.items()}
        rank.is_apart, rank.gathers_later = self._is_apart, True

    def gather(self, rank: Rank, kind: str, gather_now: Callable[[], Tensor]) -> Tensor:
        """Returns the next numbers of a group: known ones, or those that it gathers.

        Args:
            rank: calling rank.
            kind: kind of the group.
            gather_now: gathers them. Collective over the group.

        Raises:
            RuntimeError: the other ranks have gathered others.
            PeerFailure: a rank has failed, and the others cannot go on.
        """
        ranks = rank.groups[kind]
        while (found := self._next(rank, ranks)) is None:
            board = rank.board
            if board is not None:
                board.release()  # a failure does not cost the numbers, so none waits in vain
            try:
                found = gather_now()
            except RuntimeError as error:
                self._go_on(error)
                continue
            if board is not None:
                board.hold([], HOLD_S)
            break
        self.notes.gathered.append((ranks, found))
        return found

    def _next(self, rank: Rank, ranks: Ranks) -> Tensor | None:
        """Returns the next numbers that are known; None: they are to be gathered."""
        left = self._left.get(ranks)
        if left:
            return left.pop(0)
        if self._known.over.intersection(ranks):
            self._refuse(rank)
        return None

    def pass_call(self, rank: Rank) -> None:
        """Notes a call that other ranks have made, and that this one leaves out."""
        self.notes.num_calls += 1
        rank.is_apart = self._is_apart

    @property
    def _is_apart(self) -> bool:
        return self._known.are_all_over or self.notes.num_calls < self._known.num_calls

    def end(self, rank: Rank) -> None:
        """Notes that the next step begins.

        Raises:
            RuntimeError: the other ranks have gathered further numbers.
        """
        if any(self._left.values()):
            self._refuse(rank)
        self.notes.is_over = True

    def _refuse(self, rank: Rank) -> NoReturn:
        raise RuntimeError(
            f"{rank.prefix}this process repeats what the script does between two steps, and the "
            "other ranks have computed other norms there, or have checked gradients more often or "
            "less; let the content of smp.take_over lead to the step during which it was made"
        )
