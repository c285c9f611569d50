"""Finds, after a failure, the ranks that go on, and the last work that all of them have finished.

The ranks meet in the store of their `init`, because connections between them may have ended with
the failure. Work is a call of a step function; all ranks make the same ones, and a barrier ends
each. A rank that has passed the barrier shows that all ranks had entered it, hence that the work is
done everywhere. Otherwise nothing but the work under way is lost, and all that go on repeat it. See
docs/design/going_on.md.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

import smp._C as _C
from smp.world.connections import Connections
from smp.world.rank import Rank
from smp.world.shrinking import lasting_ranks
from smp.world.spares import Spares

_LOOK_S, _LOOK_FOR_FAULTS_S = 0.02, 0.1
_PULSE_S = 0.5
# A rank without a pulse for so long has died as well, or is stopped.
_SILENT_S = 10.0
# Time in which ranks that do not need the lost one finish what they do together between steps.
_HOLD_S = 10.0
# Failures of one rank; others concern all ranks.
_KINDS = ("raised", "died", "unreachable", "stuck")
_DECISION = "decision"


@dataclass(frozen=True)
class Decision:
    """The ranks that go on.

    Attributes:
        kept: present global ranks, index = global rank from now on.
        reason: the failure, in words.
        newcomers: pairs of a place among these ranks and the number of the process that takes it.
    """

    kept: list[int]
    reason: str
    newcomers: list[tuple[int, int]] = field(default_factory=list)


class Dismissed(Exception):
    """The other ranks go on without this one."""


class Survivors:
    """Watches for a failure and meets the other ranks after it. One object per set of ranks.

    Args:
        store: keys of these ranks alone.
        rank: rank of this process; its place is that among these ranks.
        connections: connections of these ranks.
        spares: processes that wait for the places of lost ranks; None: there are none.

    Attributes:
        num_done: number of works that all ranks have finished, as far as this one knows.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: Rank,
        connections: Connections,
        spares: Spares | None = None,
    ) -> None:
        self._store, self._spares = _open(store), spares
        self._own = rank.global_rank
        self._grid, self._needed = rank.grid, list(rank.groups["mp"])
        self._everyone = list(rank.groups["world"])
        self._connections, self._board = connections, connections.board
        self.num_done = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="smp-survivors", daemon=True)
        self._thread.start()

    # ---- work ------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a work, in which each failure counts.

        Raises:
            PeerFailure: a rank has failed since the last one.
        """
        self._board.release()
        self._board.raise_if_faulted()

    def confirm(self) -> None:
        """Ends a work when all ranks have. Collective.

        Until the next one the loss of a rank that this replica does not need is no failure.
        """
        assert self._connections.exchange is not None
        self._connections.exchange.barrier(self._everyone, "end of a step")
        self.note_done()

    def note_done(self) -> None:
        """Notes that all ranks have finished the work."""
        self.num_done += 1
        self._board.hold(self._needed, _HOLD_S)

    # ---- failure ---------------------------------------------------------------

    @property
    def can_go_on(self) -> bool:
        """True if another rank has failed, and no more is known than that."""
        fault = self._board.known_fault()
        return fault is not None and fault[0] in _KINDS and fault[1] != self._own

    def is_cause_of(self, error: RuntimeError) -> bool:
        """Returns whether an error of this rank is the failure of another one."""
        fault = self._board.known_fault()
        # A backward raises errors of its nodes as its own, with their text.
        in_words = fault is not None and fault[2] in str(error)
        return isinstance(error, _C.PeerFailure) or in_words

    def meet(self, timeout_s: float) -> Decision | None:
        """Meets the other ranks, all of which have stopped in the same work. Collective.

        Args:
            timeout_s: longest wait for ranks that live.

        Returns:
            the ranks that go on; None: this work is finished on all ranks.

        Raises:
            Dismissed: this rank is not among them.
            RuntimeError: no replica is whole, or a rank that lives does not come.
        """
        self._store.set(f"stopped/{self._own}", str(self.num_done))
        began_s = time.monotonic()
        seen: dict[int, tuple[bytes, float]] = {}
        while True:
            if self._store.check([_DECISION]):
                return self._taken(_decision_in(self._store.get(_DECISION)))
            if any(int(text.split()[0]) > self.num_done for text in self._pulses(seen)):
                return None
            fault = self._board.known_fault()
            assert fault is not None
            lost = {fault[1], *self._gone(seen, began_s)}
            lost |= {rank for rank in self._everyone if self._board.has_left(rank)}
            decision = self._without(lost, fault[2])
            if decision is not None:
                self._taken(decision)
                lost |= {rank for rank, _ in decision.newcomers}
            kept = self._everyone if decision is None else decision.kept
            waiting = [rank for rank in kept if not self._has_stopped(rank) and rank not in lost]
            if not waiting and decision is not None:
                self._store.compare_set(_DECISION, "", json.dumps(asdict(decision)))
            elif time.monotonic() - began_s > timeout_s:
                who = f"the ranks {waiting} live, but" if waiting else "processes for lost ranks"
                raise RuntimeError(
                    f"{_C.rank_prefix()}{who} did not come to their next "
                    f"step within {timeout_s:g} s after the failure of global_rank {fault[1]}; "
                    "give all ranks the same number of steps, or raise SMP_TIMEOUT_S"
                )
            else:
                time.sleep(_LOOK_S / 4)

    def _without(self, lost: set[int], reason: str) -> Decision | None:
        """Returns the ranks that go on without lost ones; None: it is not known yet."""
        kept = lasting_ranks(self._grid, lost)
        if not kept:
            raise RuntimeError(
                f"{_C.rank_prefix()}no replica of the model is whole without the ranks "
                f"{sorted(lost)}, so the others cannot go on; resume from a checkpoint"
            )
        if self._spares is None:
            return Decision(kept, reason)
        found = self._spares.find(lost)
        if found is None:
            return None
        if not found:
            return Decision(kept, f"{reason}; too few processes wait for places of lost ranks")
        return Decision(self._everyone, reason, sorted(found.items()))

    def _taken(self, decision: Decision) -> Decision:
        if self._own not in decision.kept or self._own in dict(decision.newcomers):
            raise Dismissed(
                f"{_C.rank_prefix()}this rank ends, because its replica is not whole any more, or "
                f"it was silent for too long; {len(decision.kept)} of {len(self._everyone)} ranks "
                f"go on ({decision.reason})"
            )
        return decision

    def _has_stopped(self, rank: int) -> bool:
        key = f"stopped/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) == self.num_done

    def _pulses(self, seen: dict[int, tuple[bytes, float]]) -> list[bytes]:
        """Returns the newest pulse of each rank, and notes when it came."""
        for rank in self._everyone:
            key = f"pulse/{rank}"
            if not self._store.check([key]):
                continue
            pulse = self._store.get(key)
            if rank not in seen or seen[rank][0] != pulse:
                seen[rank] = pulse, time.monotonic()
        return [pulse for pulse, _ in seen.values()]

    def _gone(self, seen: dict[int, tuple[bytes, float]], began_s: float) -> list[int]:
        """Returns the other ranks that have withdrawn, or were silent for too long."""
        now_s = time.monotonic()
        others = [rank for rank in self._everyone if rank != self._own]
        return [
            rank
            for rank in others
            if now_s - seen.get(rank, (b"", began_s))[1] > _SILENT_S
            or self._store.check([f"gone/{rank}"])
        ]

    def _watch(self) -> None:
        """Sends pulses after a failure, wherever the script is, with the number of works done."""
        number, sent, next_s = 0, -1, 0.0
        while self._board.known_fault() is None:
            if self._is_over.wait(_LOOK_FOR_FAULTS_S):
                return
        while not self._is_over.wait(_LOOK_S):
            num_done, now_s = self.num_done, time.monotonic()
            if num_done != sent or now_s >= next_s:
                number, sent, next_s = number + 1, num_done, now_s + _PULSE_S
                self._store.set(f"pulse/{self._own}", f"{num_done} {number}")

    def withdraw(self) -> None:
        """Tells the other ranks that this one has failed, so that they do not wait for it."""
        if self._board.known_fault() is not None:
            self._store.set(f"gone/{self._own}", "")
        self.close()

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._is_over.set()
        self._thread.join()


def _open(store: dist.Store) -> dist.Store:
    return dist.PrefixStore("survivors", store)


def await_decision(store: dist.Store, timeout_s: float) -> Decision:
    """Waits, in a process that takes a place, for the decision of the other ranks.

    Args:
        store: keys of these ranks alone.
        timeout_s: longest wait.

    Raises:
        RuntimeError: they have not decided within that time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not _open(store).check([_DECISION]):
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"{_C.rank_prefix()}the other ranks did not come to their next step within "
                f"{timeout_s:g} s, so this process cannot take its place; raise SMP_TIMEOUT_S"
            )
        time.sleep(_LOOK_S)
    return _decision_in(_open(store).get(_DECISION))


def _decision_in(text: bytes) -> Decision:
    told = json.loads(text)
    return Decision(told["kept"], told["reason"], [tuple(pair) for pair in told["newcomers"]])
