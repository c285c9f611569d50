"""Meets the other ranks after a failure, and watches for one.

The ranks meet in the store of their `init`, because connections between them may have ended with
the failure. Work is a call of a step function; all ranks make the same ones, and a barrier ends
each. A rank that has passed the barrier shows that all ranks had entered it, hence that the work is
done everywhere. Otherwise nothing but the work under way is lost, and all that go on repeat it. See
docs/design/going_on.md. `survivor_agreement` has the rules; here are the thread and the waits.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

import smp._C as _C
from smp.world.presence import no_answer
from smp.world.rank import Rank
from smp.world.recruits import Recruits
from smp.world.spares import Newcomer, Spares
from smp.world.survivor_agreement import (
    Decision,
    Finished,
    NoReplicaIsWhole,
    SurvivorAgreement,
    TimeToGrow,
    decision_of,
)

_LOOK_S, _LOOK_FOR_FAULTS_S = 0.02, 0.1
# Additional time between two looks for each rank, so that many ranks do not overload the store.
_LOOK_PER_RANK_S = 5e-5
# Most works between two plans to grow, if ranks refuse them.
_MOST_PAUSES = 50
# Time in which ranks that do not need the lost one finish what they do together between steps.
HOLD_S = 10.0
# Failures of one rank; others concern all ranks.
_KINDS = ("raised", "died", "unreachable", "stuck")


class Survivors:
    """Watches for a failure and meets the other ranks after it. One object per set of ranks.

    Args:
        store: keys of these ranks alone.
        rank: rank of this process; its place is that among these ranks. It may not be connected.
        has_ended: returns whether the process of a global rank is known to have ended.
        spares: processes that wait for the places of lost ranks; None: there are none.
        recruits: finds processes for one more replica, on the rank that plans when all grow.

    Attributes:
        num_done: number of works that all ranks have finished, as far as this one knows.
        is_connected: whether these ranks are connected. Before, they look in the store for failures
            of each other.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: Rank,
        has_ended: Callable[[int], bool],
        spares: Spares | None = None,
        recruits: Recruits | None = None,
    ) -> None:
        keys = _open(store)
        self._rank, self._recruits = rank, recruits
        self._waiting = spares.waiting if spares is not None and rank.global_rank == 0 else None
        self._patience_s = 0.0 if spares is None else spares.patience_s
        self._next_plan, self._num_refused = 0, 0  # works before the next plan to grow
        self._planned: Decision | None = None
        self._dice = random.Random()
        self._everyone = list(rank.groups["world"])
        self._lock = threading.Lock()  # of the agreement
        self._agreement = SurvivorAgreement(
            keys, rank.grid, rank.global_rank, has_ended, spares, rank.keepers
        )
        self.num_done = 0
        self.is_connected = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="smp-survivors", daemon=True)
        self._thread.start()

    # ---- work ------------------------------------------------------------------

    def begin(self, can_grow: Callable[[], bool]) -> None:
        """Begins a work, in which each failure counts.

        Args:
            can_grow: returns whether this rank has all that further ones need.

        Raises:
            TimeToGrow: the work is set aside for that; all ranks meet.
            PeerFailure: a rank has failed since the last one.
        """
        board = self._rank.board
        if board is not None:
            board.release()
        if self._rank.may_grow:  # first, as all ranks take the work for the same
            with self._asking(None):
                is_for_growing = self._look_at_growth(can_grow)
            if is_for_growing:
                self._await_all()
                raise TimeToGrow("further ranks can join")
        if board is not None:
            board.raise_if_faulted()

    def _look_at_growth(self, can_grow: Callable[[], bool]) -> bool:
        """Returns whether this work is for growing; plans that if processes are ready."""
        larger = None if self._recruits is None else self._recruits.decision
        if self._agreement.is_for_growing(self.num_done):
            if not can_grow() or larger is not self._planned:  # a newcomer has gone meanwhile
                self._agreement.refuse_growth(self.num_done)
            return True
        if larger is not None and self.num_done >= self._next_plan:
            self._agreement.plan_growth(self.num_done, larger)
            self._planned = larger
            # Gradients may be unused at each second beginning of a step, or at each tenth.
            self._num_refused = min(self._num_refused + 1, _MOST_PAUSES)
            self._next_plan = self.num_done + 1 + self._dice.randint(1, self._num_refused)
        return False

    def _await_all(self) -> None:
        """Waits for all ranks to come to a work for growing, unless one fails that is replaced."""
        if self._rank.comms.everyone is None:
            return
        try:
            self._rank.comms.everyone.barrier().wait(self._rank.timeout_s)
        except RuntimeError as error:
            if not (self.can_go_on and self.is_cause_of(error)):
                raise

    def confirm(self, has_met: bool = False) -> None:
        """Ends a work when all ranks have. Collective.

        Until the next one the loss of a rank that this replica does not need is no failure.

        Args:
            has_met: whether all ranks have just had an exchange that none passes alone.
        """
        if not has_met and self._rank.comms.everyone is not None:
            self._rank.comms.everyone.barrier().wait(self._rank.timeout_s)
        self.note_done()

    def note_done(self) -> None:
        """Notes that all ranks have finished the work."""
        self.num_done += 1
        if self._rank.board is None:
            return  # there is no other rank at present
        # With copies of states the lost rank is replaced, wherever it was.
        needed = [] if self._rank.keepers else list(self._rank.groups["mp"])
        self._rank.board.hold(needed, HOLD_S)

    # ---- failure ---------------------------------------------------------------

    @property
    def has_failure(self) -> bool:
        """True if a rank is known to have failed."""
        return self._known_fault() is not None

    @property
    def can_go_on(self) -> bool:
        """True if another rank has failed, and no more is known than that."""
        fault, is_only_replica = self._known_fault(), self._rank.sizes["rdp"] == 1
        if fault is None or (is_only_replica and not self._rank.keepers):
            return False
        return fault[0] in _KINDS and fault[1] != self._rank.global_rank

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
            the ranks that go on; None: this work is finished on all ranks, and no rank has changed.

        Raises:
            Dismissed: this rank is not among them.
            RuntimeError: no replica is whole, or a rank that lives does not come.
        """
        began_s, timeout_s = time.monotonic(), self._rank.timeout_s
        with self._asking(error):
            self._agreement.stop(self.num_done)
        while True:
            fault = self._known_fault()
            reason = str(error).split("\n")[0] if fault is None else fault[2]
            is_calm = fault is None and isinstance(error, TimeToGrow)
            try:
                with self._asking(error):
                    outcome = self._agreement.look(self._lost(), reason, time.monotonic(), is_calm)
            except NoReplicaIsWhole as none:
                if self._rank.board is not None and self._rank.sizes["rdp"] == 1:
                    self._rank.board.raise_if_faulted()  # there was only one
                raise RuntimeError(
                    f"{_C.rank_prefix()}{none}, so the others cannot go on; resume from a "
                    "checkpoint"
                ) from error
            if outcome is not None:
                return None if isinstance(outcome, Finished) else outcome
            if time.monotonic() - began_s > timeout_s + self._patience_s:
                ranks = self._agreement.waiting
                who = f"living ranks {ranks}" if ranks else "processes that take places"
                raise RuntimeError(
                    f"{_C.rank_prefix()}not all of the {who} "
                    f"came to their next step within {timeout_s:g} s after a failure ({reason}); "
                    "give all ranks the same number of steps, or raise SMP_TIMEOUT_S"
                ) from error
            time.sleep(_LOOK_S / 4 + _LOOK_PER_RANK_S * len(self._everyone))

    @contextmanager
    def _asking(self, error: BaseException | None) -> Iterator[None]:
        """Holds the agreement, and says so if the store with it is gone."""
        try:
            with self._lock:
                yield
        except dist.DistError as unreachable:
            fault = self._known_fault()
            reason = "" if fault is None else f"{fault[2]}; "
            raise no_answer(f"{_C.rank_prefix()}{reason}", unreachable) from error

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
            try:
                self._look()
            except dist.DistError:
                return  # the store is gone, as `meet` finds out if it is needed

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._waiting is not None:
            self._waiting.beat(now_s)
        if self._is_quiet:
            if self._recruits is not None:
                self._recruits.look(now_s)
            return
        with self._lock:
            self._agreement.beat(self.num_done, now_s)
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
            with self._lock, suppress(dist.DistError):
                self._agreement.note_lost(self._rank.global_rank)
        self.close()

    def note_over(self) -> None:
        """Tells processes that wait that the job has ended, on the rank that speaks for all."""
        if self._waiting is not None and not self.has_failure:
            with suppress(dist.DistError):  # they notice the silence
                self._waiting.end()

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._is_over.set()
        self._thread.join()


def _open(store: dist.Store) -> dist.Store:
    return dist.PrefixStore("survivors", store)


def await_decision(store: dist.Store, newcomer: Newcomer, timeout_s: float) -> Decision:
    """Waits, in a process that takes a place, for the decision of the other ranks.

    Args:
        store: keys of these ranks alone.
        newcomer: the place of this process.
        timeout_s: longest wait for the place of a lost rank. The other ranks train, and need not
            hurry, until a whole replica can join.

    Raises:
        RuntimeError: they have not decided within that time, or do not count on this process.
    """
    assert newcomer.place is not None
    deadline_s = float("inf") if newcomer.place.is_new else time.monotonic() + timeout_s
    try:
        while (decision := decision_of(_open(store))) is None:
            newcomer.check_wanted()
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the other ranks did not come to their next step within "
                    f"{timeout_s:g} s, so this process cannot take its place; raise SMP_TIMEOUT_S"
                )
            time.sleep(_LOOK_S)
    except dist.DistError as unreachable:
        raise no_answer(_C.rank_prefix(), unreachable) from None
    return decision
