"""What the user is told of modules that were not compiled, once."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import smp._C as _C
from smp.compilation.units import Left

_NUM_NAMED = 3


class Told:
    """Notes of one rank, and which of them the user knows."""

    def __init__(self) -> None:
        self._noted: dict[Left, None] = {}  # in order, and not told yet
        self._known: set[Hashable] = set()

    def note(self, left: Left) -> None:
        """A module is not compiled."""
        if left not in self._known:
            self._known.add(left)
            self._noted[left] = None

    def is_new(self, what: Hashable) -> bool:
        """Whether this is asked for the first time."""
        is_new = what not in self._known
        self._known.add(what)
        return is_new

    def taken(self) -> list[Left]:
        """What was noted; the caller sees to it that it is told."""
        noted = list(self._noted)
        self._noted.clear()
        return noted

    def add(self, notes: Sequence[Left]) -> None:
        """Notes of a rank, this one or another."""
        self._known.update(notes)
        self._noted.update(dict.fromkeys(notes))

    def tell(self, log: logging.Logger, is_first: bool) -> None:
        """One line for each class and reason that was noted; aloud by the first rank."""
        level, who = (logging.WARNING, "") if is_first else (logging.INFO, _C.rank_prefix())
        names: dict[tuple[str, str], list[str]] = {}
        for left in self.taken():
            names.setdefault((left.kind, left.reason), []).append(left.name)
        for (kind, reason), those in names.items():
            # Of a class that was told before, further modules are no news.
            if not self.is_new((kind, reason)):
                continue
            more = f" and {len(those) - _NUM_NAMED} more" if len(those) > _NUM_NAMED else ""
            listed = ", ".join(f"'{name}'" for name in those[:_NUM_NAMED]) + more
            log.log(
                level, "smp: %s%s (%s) runs without torch.compile: %s", who, kind, listed, reason
            )
