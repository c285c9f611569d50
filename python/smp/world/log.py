"""The log, in which the first rank writes for all ranks."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING

logger = logging.getLogger("smp")

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 takes no parameters of types here
    _Adapter = logging.LoggerAdapter


class FirstRankLog(_Adapter):
    """The log of the library, silent on all ranks but the first; before `init` it is enabled."""

    def __init__(self) -> None:
        super().__init__(logger, {})
        self._speaks = True
        self._told: set[Hashable] = set()

    def isEnabledFor(self, level: int) -> bool:
        return self._speaks and super().isEnabledFor(level)

    def begin(self, global_rank: int | None) -> None:
        """Begins a run, in which only rank 0 logs; None: the run is over."""
        self._speaks = not global_rank
        self._told.clear()

    def is_new(self, what: Hashable) -> bool:
        """Returns whether ``what`` is passed for the first time since `init`."""
        if what in self._told:
            return False
        self._told.add(what)
        return True


first_rank_log = FirstRankLog()
