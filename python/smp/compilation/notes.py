"""Collects modules that were not compiled, and logs each reason once."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import smp._C as _C
from smp.compilation.units import Left

_NUM_NAMED = 3


class CompilationNotes:
    """Notes of one rank, and modules that were logged before."""

    def __init__(self) -> None:
        self._noted: dict[Left, None] = {}  # in order; not logged yet
        self._known: set[Hashable] = set()

    def note(self, left: Left) -> None:
        """Notes a module that is not compiled."""
        if left not in self._known:
            self._known.add(left)
            self._noted[left] = None

    def is_new(self, what: Hashable) -> bool:
        """Returns whether this is asked for the first time."""
        is_new = what not in self._known
        self._known.add(what)
        return is_new

    def take(self) -> list[Left]:
        """Takes the notes; the caller has to log them."""
        noted = list(self._noted)
        self._noted.clear()
        return noted

    def add(self, notes: Sequence[Left]) -> None:
        """Adds notes of this or another rank."""
        self._known.update(notes)
        self._noted.update(dict.fromkeys(notes))

    def write(self, log: logging.Logger, is_first: bool) -> None:
        """Logs a line for each class and reason; as a warning on the first rank."""
        level, who = (logging.WARNING, "") if is_first else (logging.INFO, _C.rank_prefix())
        names: dict[tuple[str, str], list[str]] = {}
        for left in self.take():
            names.setdefault((left.kind, left.reason), []).append(left.name)
        for (kind, reason), modules in names.items():
            # Further modules of a class and reason that were logged before are not logged.
            if not self.is_new((kind, reason)):
                continue
            more = f" and {len(modules) - _NUM_NAMED} more" if len(modules) > _NUM_NAMED else ""
            listed = ", ".join(f"'{name}'" for name in modules[:_NUM_NAMED]) + more
            log.log(
                level, "smp: %s%s (%s) runs without torch.compile: %s", who, kind, listed, reason
            )
