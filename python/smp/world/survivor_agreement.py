"""The agreement, after a failure, on the ranks that go on and on the work that is finished.

This is the logic alone: it reads and writes keys of a store and is given the time, but has neither
threads nor waits, so tests run it for a thousand simulated ranks. `survivors` runs it for real.

Work is a call of a step function. Each rank counts the works that it knows to be finished on all
ranks, and a rank that has stopped in a work wants to know one thing: whether some rank has passed
it. Either all ranks that go on stop in the same work, and then they repeat it, or one of them has
passed it, and then it is finished. The first outcome that any rank writes holds for all.

A work may also be set aside for growing: all ranks stop when they come to it, and let further ones
in. See docs/design/going_on.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Protocol

import smp._C as _C
from smp.world.shrinking import have_all_parts, lasting_ranks

PULSE_S = 0.5
# A rank without a pulse for so long has died as well, or is stopped.
SILENT_S = 10.0
_NUM_WATCHED = 2
_FINISHED, _DECISION = "finished", "decision"
_OPEN = -1  # in `Decision.kept`


class Keys(Protocol):
    """The part of `torch.distributed.Store` that the agreement uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Decision:
    """The ranks that go on.

    Attributes:
        kept: present global ranks, index = global rank from now on; -1: a newcomer has the place.
        reason: the failure, or what else has changed, in words.
        newcomers: pairs of a place among these ranks and the number of the process that takes it.
    """

    kept: list[int]
    reason: str
    newcomers: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """The work in which a rank has stopped is finished on all ranks."""


class TimeToGrow(Exception):
    """Stops all ranks before the step that begins, so that they let further ones in."""


class Dismissed(Exception):
    """The other ranks go on without this one."""


class NoReplicaIsWhole(Exception):
    """Reports that no rank can go on."""


class Replacements(Protocol):
    """Processes that wait for the places of lost ranks: `spares.Spares`."""

    def find(self, lost: Collection[int]) -> dict[int, int] | None: ...


class SurvivorAgreement:
    """Takes part in an agreement, for one rank. One object per set of ranks.

    A look costs a fixed number of requests to the store, whatever the number of ranks.

    Args:
        keys: keys of these ranks alone.
        grid: grid of these ranks.
        global_rank: rank of this process among them.
        has_ended: returns whether the process of a global rank is known to have ended.
        spares: processes that wait for the places of lost ranks; None: there are none.
        keepers: rank with a copy of each rank's state, index = global rank; empty: there are none.

    Attributes:
        waiting: ranks that live and have not stopped yet, after a `look` without an outcome; empty:
            processes have not taken places yet.
    """

    def __init__(
        self,
        keys: Keys,
        grid: _C.ProcessGrid,
        global_rank: int,
        has_ended: Callable[[int], bool] = lambda _: False,
        spares: Replacements | None = None,
        keepers: Sequence[int] = (),
    ) -> None:
        self._keys, self._grid, self._own = keys, grid, global_rank
        self._has_ended, self._spares, self._keepers = has_ended, spares, keepers
        self.waiting: list[int] = []
        self._num_stopped = -1  # number of works finished when this rank stopped; -1: it has not
        self._awaited = -1  # a rank that had not stopped at the last look
        self._num_pulses, self._next_pulse_s = 0, 0.0
        self._num_passed = 0
        self._pulses: dict[int, tuple[bytes, float]] = {}
        self._next_look_s = 0.0
        self._lost: dict[int, int] = {}  # lost ranks, by the number of the note

    # ---- notes for the other ranks ---------------------------------------------

    def beat(self, num_done: int, now_s: float) -> None:
        """Sends a pulse if one is due, and the number of works that this rank knows to be done."""
        if num_done > self._num_passed:
            self._num_passed = num_done
            self._keys.set(f"passed/{num_done}", "")
        if now_s >= self._next_pulse_s:
            self._num_pulses, self._next_pulse_s = self._num_pulses + 1, now_s + PULSE_S
            self._keys.set(f"pulse/{self._own}", str(self._num_pulses))

    def stop(self, num_done: int) -> None:
        """Notes that this rank has stopped in the work after `num_done` others."""
        self._num_stopped = num_done
        self._pulses = {}  # ranks send none while they are connected, so earlier ones are old
        self._keys.set(f"stopped/{num_done}/{self._own}", "")
        self._keys.add(f"num_stopped/{num_done}", 1)

    def note_lost(self, global_rank: int) -> None:
        """Notes that a rank is lost, so that no rank waits for it."""
        key = f"lost/{global_rank}"
        if not self._keys.check([key]):
            self._keys.set(key, "")
            self._keys.set(f"loss/{self._keys.add('num_losses', 1)}", str(global_rank))

    # ---- growing ---------------------------------------------------------------

    def plan_growth(self, num_done: int, larger: Decision) -> None:
        """Sets the next work aside, for all ranks. One rank calls it, when it begins a work.

        No rank passes the barrier that ends this work before, so all see it when they come there.

        Args:
            num_done: number of works finished.
            larger: the ranks that take part then.
        """
        self._keys.set(f"grow/{num_done + 1}", json.dumps(asdict(larger)))

    def is_for_growing(self, num_done: int) -> bool:
        """Returns whether the work after `num_done` others is set aside."""
        return self._keys.check([f"grow/{num_done}"])

    def refuse_growth(self, num_done: int) -> None:
        """Notes that this rank cannot let others in before the step that begins; before `stop`."""
        self._keys.set(f"refused/{num_done}", "")

    def _grow(self) -> Decision | Finished | None:
        """Returns the outcome of a work for growing: the larger set, or that nothing changes."""
        self.waiting = list(range(self._grid.world_size))
        if not self._have_stopped(self.waiting):
            return None
        number = self._num_stopped
        is_refused = self._keys.check([f"refused/{number}"])
        text = _FINISHED if is_refused else self._keys.get(f"grow/{number}").decode()
        return self._take(self._keys.compare_set(f"outcome/{number}", "", text))

    # ---- the outcome -----------------------------------------------------------

    def look(
        self, lost: Collection[int], reason: str, now_s: float, is_calm: bool = False
    ) -> Decision | Finished | None:
        """Looks whether the work in which this rank has stopped has an outcome, or makes it one.

        Args:
            lost: ranks that this one knows to be lost.
            reason: the failure, in words.
            now_s: present time.
            is_calm: whether the ranks have stopped to grow, and no failure is known here.

        Returns:
            the outcome, equal on all ranks that stop in this work; None: look again later.

        Raises:
            Dismissed: this rank is not among those that go on.
            NoReplicaIsWhole: there are none.
        """
        outcome = f"outcome/{self._num_stopped}"
        if self._keys.check([outcome]):
            return self._take(self._keys.get(outcome))
        if self._keys.check([f"passed/{self._num_stopped + 1}"]):
            return self._take(self._keys.compare_set(outcome, "", _FINISHED))
        if is_calm:
            return self._grow()
        # News of connections are not passed on: after a partition each side has lost the other.
        gone = self._all_lost(now_s) | frozenset(lost)
        # With copies each rank may have the only part of a state beside one copy of it.
        kept = [] if self._keepers else lasting_ranks(self._grid, gone)
        has_all = self._spares is not None and have_all_parts(self._grid, gone, self._keepers)
        if not kept and not has_all:
            also = "; the copies of their states were lost as well" if self._keepers else ""
            raise NoReplicaIsWhole(f"no replica of the model is whole without {sorted(gone)}{also}")
        decision = self._filled(gone, Decision(kept, reason))
        if decision is None:
            return None
        stays = [rank for rank in decision.kept if rank != _OPEN]
        if self._own not in stays:
            self._dismiss(stays, reason)
        if not self._have_stopped(stays):
            self.waiting = stays
            return None
        decided = json.dumps(asdict(decision))
        return self._take(self._keys.compare_set(outcome, "", decided))

    def _filled(self, lost: Collection[int], smaller: Decision) -> Decision | None:
        """Returns the decision with processes in the places of lost ranks, if enough wait.

        Args:
            lost: ranks that are lost.
            smaller: decision without such processes.

        Returns:
            the decision; None: it is not known yet.

        Raises:
            NoReplicaIsWhole: too few processes wait, and fewer ranks cannot go on.
        """
        if self._spares is None:
            return smaller
        found = self._spares.find(lost)
        if found is None:
            self.waiting = []
            return None
        if not found:
            few = "too few processes wait for places of lost ranks"
            if not smaller.kept:
                raise NoReplicaIsWhole(f"{few}, and no replica is whole without {sorted(lost)}")
            return replace(smaller, reason=f"{smaller.reason}; {few}")
        kept = [_OPEN if rank in found else rank for rank in range(self._grid.world_size)]
        return Decision(kept, smaller.reason, sorted(found.items()))

    def find_failure(self, now_s: float) -> int | None:
        """Looks for a failure before any rank has stopped here. For ranks that connect.

        Args:
            now_s: present time.

        Returns:
            a rank that is lost; -1: another rank has stopped, for a reason that is not known here;
            None: there is no failure.
        """
        lost = min(self._all_lost(now_s), default=None)
        if lost is None and self._keys.check(["num_stopped/0"]):
            return -1
        return lost

    def _have_stopped(self, ranks: Sequence[int]) -> bool:
        """Returns whether all of some ranks have stopped in the same work as this one.

        A request with the keys of all ranks is large, so most looks ask for one of them only.
        """
        if self._awaited in ranks and not self._check_stopped([self._awaited]):
            return False
        if self._keys.add(f"num_stopped/{self._num_stopped}", 0) < len(ranks):
            return False
        if self._check_stopped(ranks):
            return True
        while len(ranks) > 1:  # finds a rank that has not stopped
            half = ranks[: len(ranks) // 2]
            ranks = ranks[len(half) :] if self._check_stopped(half) else half
        self._awaited = ranks[0]
        return False

    def _check_stopped(self, ranks: Sequence[int]) -> bool:
        return self._keys.check([f"stopped/{self._num_stopped}/{rank}" for rank in ranks])

    def _take(self, outcome: bytes) -> Decision | Finished:
        text = outcome.decode()
        if text == _FINISHED:
            return Finished()
        if self._spares is not None:
            self._keys.set(_DECISION, text)  # for processes that take places
        decision = _read(text)
        if self._own not in decision.kept:
            self._dismiss(decision.kept, decision.reason)
        return decision

    def _dismiss(self, kept: Sequence[int], reason: str) -> None:
        raise Dismissed(
            f"this rank ends, because its replica is not whole any more, or it was silent for too "
            f"long; {len(kept)} of {self._grid.world_size} ranks go on ({reason})"
        )

    def _all_lost(self, now_s: float) -> frozenset[int]:
        """Returns the ranks that any rank has noted as lost, this one excepted."""
        self._watch_next(now_s)
        # Not by the value of the counter: a store in a file would write it at each look.
        while self._keys.check([f"loss/{len(self._lost) + 1}"]):
            self._lost[len(self._lost) + 1] = int(self._keys.get(f"loss/{len(self._lost) + 1}"))
        return frozenset(self._lost.values()) - {self._own}

    def _watch_next(self, now_s: float) -> None:
        """Notes the next ranks after this one as lost if they have ended or send no pulses.

        They are few, so that the store is not asked for all ranks by all ranks; and ranks of which
        connections have told this one are among them, as those have told others of other ranks.
        """
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + PULSE_S
        size, lost = self._grid.world_size, set(self._lost.values())
        after = ((self._own + step) % size for step in range(1, size))
        pulses = {}
        for rank in islice((rank for rank in after if rank not in lost), _NUM_WATCHED):
            key = f"pulse/{rank}"
            pulse = self._keys.get(key) if self._keys.check([key]) else b""
            known, since_s = self._pulses.get(rank, (None, now_s))
            pulses[rank] = (pulse, since_s if pulse == known else now_s)
            # A rank that has sent none may still be ending its former connections.
            silent_s = SILENT_S if pulse else 2 * SILENT_S
            if now_s - pulses[rank][1] > silent_s or self._has_ended(rank):
                self.note_lost(rank)
        self._pulses = pulses


def decision_of(keys: Keys) -> Decision | None:
    """Returns the decision of ranks, if they have made one.

    Args:
        keys: keys of these ranks alone.
    """
    return _read(keys.get(_DECISION).decode()) if keys.check([_DECISION]) else None


def _read(text: str) -> Decision:
    told = json.loads(text)
    return Decision(told["kept"], told["reason"], [tuple(pair) for pair in told["newcomers"]])
