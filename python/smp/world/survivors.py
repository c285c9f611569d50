"""Meets the other ranks after a failure, and watches for one.

The ranks meet in the store of their `init`, because connections between them may have ended with
the failure. Work is a call of a step function; all ranks make the same ones, and a barrier ends
each. A rank that has passed the barrier shows that all ranks had entered it, hence that the work is
done everywhere. Otherwise nothing but the work under way is lost, and all that go on repeat it. See
docs/design/going_on.md. `survivor_agreement` has the rules; here are the thread and the waits.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

import smp._C as _C
from smp.world.rank import Rank
from smp.world.spares import Spares
from smp.world.survivor_agreement import (
    Decision,
    Finished,
    NoReplicaIsWhole,
    SurvivorAgreement,
    decision_of,
)

_LOOK_S, _LOOK_FOR_FAULTS_S = 0.02, 0.1
# Additional time between two looks for each rank, so that many ranks do not overload the store.
_LOOK_PER_RANK_S = 5e-5
# Time in which ranks that do not need the lost one finish what they do together between steps.
_HOLD_S = 10.0
# Failures of one rank; others concern all ranks.
_KINDS = ("raised", "died", "unreachable", "stuck")


class Survivors:
    """Watches for a failure and meets the other ranks after it. One object per set of ranks.

    Args:
        store: keys of these ranks alone.
        rank: rank of this process; its place is that among these ranks. It may not be connected.
        spares: processes that wait for the places of lost ranks; None: there are none.

    Attributes:
        num_done: number of works that all ranks have finished, as far as this one knows.
        is_connected: whether these ranks are connected. Before, they look in the store for failures
            of each other.
    """

    def __init__(self, store: dist.Store, rank: Rank, spares: Spares | None = None) -> None:
        keys = _open(store)
        self._rank = rank
        self._everyone = list(rank.groups["world"])
        self._lock = threading.Lock()  # of the agreement
        self._agreement = SurvivorAgreement(keys, rank.grid, rank.global_rank, spares, rank.keepers)
        self.num_done = 0
        self.is_connected = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="smp-survivors", daemon=True)
        self._thread.start()

    # ---- work ------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a work, in which each failure counts.

        Raises:
            PeerFailure: a rank has failed since the last one.
        """
        assert self._rank.board is not None
        self._rank.board.release()
        self._rank.board.raise_if_faulted()

    def confirm(self, has_met: bool = False) -> None:
        """Ends a work when all ranks have. Collective.

        Until the next one the loss of a rank that this replica does not need is no failure.

        Args:
            has_met: whether all ranks have just had an exchange that none passes alone.
        """
        if not has_met:
            assert self._rank.comms.everyone is not None
            self._rank.comms.everyone.barrier().wait(self._rank.timeout_s)
        self.note_done()

    def note_done(self) -> None:
        """Notes that all ranks have finished the work."""
        assert self._rank.board is not None
        self.num_done += 1
        # With copies of states the lost rank is replaced, if it has done its part between steps.
        needed = [] if self._rank.keepers else list(self._rank.groups["mp"])
        self._rank.board.hold(needed, _HOLD_S)

    # ---- failure ---------------------------------------------------------------

    @property
    def can_go_on(self) -> bool:
        """True if another rank has failed, and no more is known than that."""
        fault = self._known_fault()
        return fault is not None and fault[0] in _KINDS and fault[1] != self._rank.global_rank

    def is_cause_of(self, error: RuntimeError) -> bool:
        """Returns whether an error of this rank is the failure of another one."""
        fault = self._known_fault()
        # A backward raises errors of its nodes as its own, with their text.
        in_words = fault is not None and fault[2] in str(error)
        return isinstance(error, _C.PeerFailure) or in_words

    def meet(self, error: BaseException) -> Decision | None:
        """Meets the other ranks, all of which have stopped in the same work. Collective.

        Args:
            error: reason why this rank has stopped.

        Returns:
            the ranks that go on; None: this work is finished on all ranks.

        Raises:
            Dismissed: this rank is not among them.
            RuntimeError: no replica is whole, or a rank that lives does not come.
        """
        began_s, timeout_s = time.monotonic(), self._rank.timeout_s
        with self._lock:
            self._agreement.stop(self.num_done)
        while True:
            fault = self._known_fault()
            reason = str(error).split("\n")[0] if fault is None else fault[2]
            try:
                with self._lock:
                    outcome = self._agreement.look(self._lost(), reason, time.monotonic())
            except NoReplicaIsWhole as none:
                raise RuntimeError(
                    f"{_C.rank_prefix()}{none}, so the others cannot go on; resume from a "
                    "checkpoint"
                ) from error
            if outcome is not None:
                return None if isinstance(outcome, Finished) else outcome
            if time.monotonic() - began_s > timeout_s:
                ranks = self._agreement.waiting
                who = f"living ranks {ranks}" if ranks else "processes that take places"
                raise RuntimeError(
                    f"{_C.rank_prefix()}not all of the {who} "
                    f"came to their next step within {timeout_s:g} s after a failure ({reason}); "
                    "give all ranks the same number of steps, or raise SMP_TIMEOUT_S"
                ) from error
            time.sleep(_LOOK_S / 4 + _LOOK_PER_RANK_S * len(self._everyone))

    def _known_fault(self) -> tuple[str, int, str] | None:
        board = self._rank.board
        return None if board is None else board.known_fault()

    def _lost(self) -> set[int]:
        """Returns the ranks that this one knows to be lost."""
        board, fault = self._rank.board, self._known_fault()
        lost = set[int]()
        if fault is not None and fault[1] >= 0:
            lost.add(fault[1])
        if board is not None:
            lost |= {rank for rank in self._everyone if board.has_left(rank)}
        return lost - {self._rank.global_rank}

    def _watch(self) -> None:
        """Sends pulses, wherever the script is, after a failure and while ranks connect."""
        pause_s = _LOOK_S + _LOOK_PER_RANK_S * len(self._everyone)
        while not self._is_over.wait(_LOOK_FOR_FAULTS_S if self._is_quiet else pause_s):
            if self._is_quiet:
                continue
            with self._lock:
                self._agreement.beat(self.num_done, time.monotonic())
                if not self.is_connected and self._known_fault() is None:
                    self._end_waits()

    @property
    def _is_quiet(self) -> bool:
        return self.is_connected and self._known_fault() is None

    def _end_waits(self) -> None:
        """Ends the waits of this rank for connections if another one cannot make them."""
        lost = self._agreement.find_failure(time.monotonic())
        if lost is not None and self._rank.board is not None:
            self._rank.board.report_lost(lost, "while ranks connected again")

    def withdraw(self) -> None:
        """Tells the other ranks that this one has failed, so that they do not wait for it."""
        if not self._is_quiet:
            with self._lock:
                self._agreement.note_lost(self._rank.global_rank)
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
    while (decision := decision_of(_open(store))) is None:
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"{_C.rank_prefix()}the other ranks did not come to their next step within "
                f"{timeout_s:g} s, so this process cannot take its place; raise SMP_TIMEOUT_S"
            )
        time.sleep(_LOOK_S)
    return decision
