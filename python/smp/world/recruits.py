"""Finds processes for one more replica, while the ranks of a smaller job train.

One rank looks for them (`survivors` runs it in a thread). When enough processes wait for a whole
replica they get its places, and build their models meanwhile. Then all ranks stop at the beginning
of one step, and let them in. See docs/design/going_on.md.
"""

from __future__ import annotations

from dataclasses import replace

import smp._C as _C
from smp.world.shrinking import places_with_replicas
from smp.world.spares import Place, Waiting, hello_of
from smp.world.survivor_agreement import Decision

# Time between two looks, while none has a place and while some build their models.
_LOOK_S, _LOOK_AT_PLACES_S = 1.0, 0.1


class Recruits:
    """Finds the processes for one more replica. One object per set of ranks, on one of them.

    Args:
        waiting: processes that wait.
        grid: grid of these ranks.
        place: place of rank 0 among these ranks.

    Attributes:
        decision: the larger set of ranks; None: its processes are not there yet.
    """

    def __init__(self, waiting: Waiting, grid: _C.ProcessGrid, place: Place) -> None:
        self._waiting, self._place = waiting, place
        self._kept = places_with_replicas(grid, grid.group_size("rdp") + 1)
        self._open = [number for number, rank in enumerate(self._kept) if rank < 0]
        self._taken: dict[int, int] = {}
        self._num_asked, self._token = 0, ""
        self._asked_s: float | None = None
        self._next_s = 0.0
        self.decision: Decision | None = None

    def look(self, now_s: float) -> None:
        """Looks for processes if that is due, and whether those with places are ready.

        Args:
            now_s: present time.
        """
        if now_s < self._next_s:
            return
        gone = [place for place, number in self._taken.items() if self._waiting.is_gone(number)]
        for place in gone:
            del self._taken[place]
        missing = [place for place in self._open if place not in self._taken]
        if missing:
            self._find(missing, now_s)
        is_busy = self._asked_s is not None or bool(self._taken)
        self._next_s = now_s + (_LOOK_AT_PLACES_S if is_busy else _LOOK_S)
        is_ready = not missing and all(map(self._waiting.is_ready, self._taken.values()))
        if not is_ready:
            self.decision = None
        elif self.decision is None:
            words = "a replica more can join"
            self.decision = Decision(self._kept, words, sorted(self._taken.items()))

    def _find(self, places: list[int], now_s: float) -> None:
        """Gives places to processes, if as many wait."""
        if len(self._waiting.free()) < len(places):
            self._asked_s = None
            return
        if self._asked_s is None:
            self._asked_s, self._num_asked = now_s, self._num_asked + 1
            self._token = f"{self._place.generation} more {self._num_asked}"
            self._waiting.ask(self._token)
        free = self._waiting.answers(self._token, len(places), now_s - self._asked_s)
        if free is None:
            return
        self._asked_s = None
        if len(free) < len(places):
            return
        found = {**self._taken, **dict(zip(places, sorted(free), strict=False))}
        hosts = [
            hello_of(self._waiting.store, found[number]).host
            if rank < 0
            else self._place.hellos[rank].host
            for number, rank in enumerate(self._kept)
        ]
        for place in places:
            if self._waiting.offer(found[place], replace(self._place, rank=place, hosts=hosts)):
                self._taken[place] = found[place]
