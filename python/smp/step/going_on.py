"""Runs steps so that the ranks that live go on after a failure, if ``on_failure`` says so.

A step that fails is run again by the ranks that are left, and by processes that take the places of
lost ones, with the same arguments and the state that it began with. See docs/design/going_on.md.
"""

from __future__ import annotations

import _random
import ctypes
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import smp._C as _C
from smp.model.engine import Engine
from smp.precision.holdings import master_of
from smp.step import copies, taking_over
from smp.world import failure, runtime
from smp.world.between_steps import known_to
from smp.world.preemption import leave_without_place
from smp.world.survivor_agreement import Decision, Dismissed, TimeToGrow
from smp.world.survivors import Survivors

_log = logging.getLogger("smp")
_T = TypeVar("_T")
# Times that ranks try to connect although none of them is lost.
_MOST_TRIES = 3
# Time for the goodbyes of all ranks before they connect with further ones.
_GOODBYE_S = 10.0


@dataclass(frozen=True)
class Resized:
    """The replicas from now on, after a failure or when processes join, for `smp.on_resize`.

    Attributes:
        reason: the failure, or what else has changed, in words.
        dp_size_before: `smp.dp_size()` before it.
        dp_size: `smp.dp_size()` from now on.
        lost: numbers that the launcher gave to the ranks that do not go on.
        seconds: duration of each part: ``agree`` (the ranks meet), ``groups`` (connections are
            made), ``models`` (reducers and pipelines are laid out, and newcomers get their state).
        newcomers: numbers that the launcher gave to the processes that have come.
    """

    reason: str
    dp_size_before: int
    dp_size: int
    lost: list[int]
    seconds: dict[str, float] = field(compare=False)
    newcomers: list[int] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The change in words, for the log."""
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        sizes = f"dp_size {self.dp_size_before} -> {self.dp_size} ({parts})"
        if not self.lost and self.newcomers:
            return f"{self.reason}; the processes {self.newcomers} have joined: {sizes}"
        if not self.lost:
            return f"{self.reason}; the ranks go on without those that were to join: {sizes}"
        return (
            f"{self.reason}; the ranks {self.lost} are lost, "
            + (f"{self.newcomers} take their places, " if self.newcomers else "")
            + f"and the others go on: {sizes}"
        )


def on_resize(callback: Callable[[Resized], None]) -> None:
    """Calls back on each rank when ranks were lost or have joined. Not collective.

    Ranks and sizes (`smp.dp_rank`, `smp.dp_size`) have their new values then. The callback runs on
    the thread of the script inside of the call of a step function, which is run afterwards (again,
    after a failure) with its arguments; there the script lays out its sampler again, for batches
    after this one. With ``redundancy`` it may also run in `smp.clip_grad_norm_` or
    ``optimizer.step``, where the ranks wait for the lost one. All callbacks of all ranks run, in
    the order in which they were given.

    Args:
        callback: receives a `Resized`.

    Raises:
        ValueError: ``on_failure`` is "end", so it would never be called.
    """
    current = runtime.current()
    if not current.rank.config.goes_on:
        raise ValueError(
            f"{_C.rank_prefix()}smp.on_resize: on_failure={current.rank.config.on_failure!r}, so "
            'all ranks end when one fails; pass on_failure="shrink" to smp.init'
        )
    current.on_resize.append(callback)


def run(current: runtime.Runtime, name: str, has_run: bool, call: Callable[[], _T]) -> _T:
    """Runs a call of a step function; runs it again after a failure, if ranks go on then.

    Args:
        current: the runtime.
        name: name of the step function, for errors.
        has_run: whether the function has returned before, with gradients enabled as now.
        call: runs the step once.

    Raises:
        PeerFailure: a rank has failed, and the others cannot go on.
        SystemExit: the others go on without this rank.
    """
    current.rank.is_apart = current.rank.gathers_later = False
    if current.copies is None and current.rank.keepers:
        current.copies = _copies_of(current)
    try:
        return _run_until_done(current, name, _Start(current, has_run), call)
    except BaseException:
        if current.survivors is not None:
            current.survivors.withdraw()
        raise


def _copies_of(current: runtime.Runtime, content: bytes = b"") -> copies.Copies:
    go_on = partial(_go_on_between, current)
    return copies.Copies(current, taking_over.state_after, go_on, content)


def repeat(current: runtime.Runtime, name: str) -> Any:
    """Returns the result of the last finished step, in a process that begins with its end.

    Args:
        current: the runtime.
        name: name of the step function that the script calls.

    Raises:
        RuntimeError: that step was of another function.
    """
    assert current.step_to_repeat is not None
    repeated = current.step_to_repeat(name)
    own = current.copies = _copies_of(current, repeated.content)
    own.repeat_between(repeated.known)
    return repeated.result


def _run_until_done(
    current: runtime.Runtime, name: str, start: _Start, call: Callable[[], _T]
) -> _T:
    kept = current.copies
    while (survivors := current.survivors) is not None:
        done: list[_T] = []
        try:
            if kept is not None:
                kept.begin()
            survivors.begin(start.can_be_given)
            done.append(call())
            survivors.confirm(has_met=kept is not None and kept.exchange(name, done[0]))
            if kept is not None:
                kept.commit()
            return done[0]
        except (RuntimeError, TimeToGrow) as error:
            noticed_s = time.monotonic()
            if not isinstance(error, TimeToGrow):
                _check_others_go_on(current, survivors, error)
            decision = _meet(current, survivors, error)
            if decision is None:
                survivors.note_done()
                if isinstance(error, TimeToGrow):
                    continue  # not all ranks could
                assert done, "a step that is over on some rank has a result on all"
                if kept is not None:
                    kept.commit()
                return done[0]
            start.refuse_lost(name, error)
            if not survivors.has_failure and current.rank.connections is not None:
                current.rank.connections.leave(_GOODBYE_S)  # else others would take it for dead
            _go_on(current, decision, noticed_s, start.restore)
            if kept is not None:
                kept.join_groups()
            start.restore()
    return call()


def _go_on_between(current: runtime.Runtime, error: RuntimeError) -> None:
    """Goes on after a failure in an exchange between two steps. Collective over all ranks.

    The others are in such an exchange, too, or have come to their next step. Each meets the others
    where it is, and then makes its exchange again, or its step.

    Args:
        current: the runtime.
        error: error of the exchange.

    Raises:
        PeerFailure, RuntimeError: the error, if it is not the failure of another rank; or the
            others cannot go on.
        SystemExit: the others go on without this rank.
    """
    noticed_s = time.monotonic()
    rank, kept, survivors = current.rank, current.copies, current.survivors
    assert kept is not None and survivors is not None and rank.between is not None
    # Until the script goes on, nothing that is called here is a call of the script.
    between, rank.between = rank.between, None
    rank.is_apart, rank.gathers_later = False, True
    try:
        _check_others_go_on(current, survivors, error)
        decision = _meet(current, survivors, error)
        assert decision is not None, "no rank passes the next step before this one comes there"
        _go_on(current, decision, noticed_s, restore=lambda: None)
        kept.join_groups()
    except BaseException:
        if current.survivors is not None:
            current.survivors.withdraw()
        raise
    rank.between = between
    between.resume(rank, known_to(rank.global_rank, kept.noted))


def _check_others_go_on(
    current: runtime.Runtime, survivors: Survivors, error: RuntimeError
) -> None:
    """Raises an error that is not the failure of another rank, or after which all end."""
    if not (survivors.can_go_on and survivors.is_cause_of(error)):
        raise error
    peer = _C.PeerFailure(str(error))  # also where autograd has raised it
    current.record.failed(current.rank.culprit(peer), error, ends=False)


def _meet(current: runtime.Runtime, survivors: Survivors, error: BaseException) -> Decision | None:
    try:
        return survivors.meet(error)
    except Dismissed as dismissed:
        _log.warning("smp: %s%s", _C.rank_prefix(), dismissed)
        leave_without_place(current.rank)


def _go_on(
    current: runtime.Runtime, decision: Decision, noticed_s: float, restore: Callable[[], None]
) -> None:
    """Makes the groups of the ranks that go on, and lays out what uses them. Collective.

    Args:
        current: the runtime.
        decision: ranks that go on.
        noticed_s: time at which this rank has noticed the failure.
        restore: restores the state at the beginning of the step, which newcomers get.
    """
    before, launched = current.rank.sizes["dp"], current.launched
    num_tries, all_launched = 0, set(launched)
    while True:
        times_s = [noticed_s, time.monotonic()]
        try:
            newcomers = dict(decision.newcomers)
            all_launched |= set(newcomers.values())
            own = decision.kept.index(current.rank.global_rank)
            current.regroup(decision.kept, newcomers, own)
            times_s.append(time.monotonic())
            if newcomers:
                taking_over.give_places(current, newcomers)
            for engine in current.wrapped.engines.values():
                engine.join_groups()
            if newcomers:
                restore()
                taking_over.give_state(current, newcomers)
            if current.survivors is not None:
                current.survivors.confirm()
            break
        except RuntimeError as error:  # one more is lost
            again = _meet_again(current, error)
            if again is None:
                break  # all have connected, and the next step finds the failure
            num_tries += 1
            if num_tries > _MOST_TRIES and len(again.kept) == current.rank.world_size:
                raise
            decision = again
    times_s.append(time.monotonic())
    parts = zip(("agree", "groups", "models"), times_s, times_s[1:], strict=False)
    resized = Resized(
        decision.reason,
        before,
        current.rank.sizes["dp"],
        sorted(set(launched) - set(current.launched)),
        {name: end_s - begin_s for name, begin_s, end_s in parts},
        sorted(set(current.launched) - set(launched)),
    )
    if current.is_first_of_old(resized.newcomers):
        failure.note_given_up(sorted(all_launched - set(current.launched)))
        _log.warning("smp: %s", resized.words)
    for callback in list(current.on_resize):
        callback(resized)


def _meet_again(current: runtime.Runtime, error: RuntimeError) -> Decision | None:
    """Agrees once more after a failure while ranks connected. Collective over them."""
    survivors, connections = current.survivors, current.rank.connections
    if survivors is None:  # no other replica is left
        raise error
    decision = _meet(current, survivors, error)
    if decision is None:
        survivors.note_done()
    elif connections is not None:
        connections.has_failed = True  # so that nothing waits for the others
    return decision


class _NumpyRandom:
    """Reads the state of NumPy's global generator, which takes 40 us, only if it has changed.

    Its words are compared in memory (`BitGenerator.ctypes`). They do not show whether half of a
    pair of normal numbers is kept, so a state that has one is always read.
    """

    _NUM_BYTES = 625 * 4  # mt19937: 624 words and the position

    def __init__(self) -> None:
        self._words, self._state = b"", dict[str, Any]()

    def state(self) -> dict[str, Any] | None:
        """Returns the state; None: NumPy is not imported."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        words = self._read_words(numpy)
        if not words or words != self._words or self._state["has_gauss"]:
            self._words, self._state = words, numpy.random.get_state(legacy=False)
        return self._state

    def _read_words(self, numpy: Any) -> bytes:
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return b""  # the script has chosen another one
        return ctypes.string_at(generator.ctypes.state_address, self._NUM_BYTES)


class _PythonRandom:
    """Reads the state of `random`, which makes 625 objects, only if it has changed.

    The memory of the generator is compared; the kept half of a pair of normal numbers is outside.
    """

    def __init__(self) -> None:
        self._words: tuple[bytes, object] = (b"", None)
        self._state: tuple[Any, ...] = ()

    def state(self) -> tuple[Any, ...]:
        """Returns the state."""
        generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        memory = ctypes.string_at(id(generator), _random.Random.__basicsize__)
        words = memory, generator.gauss_next
        if words != self._words or not self._state:
            self._words, self._state = words, random.getstate()
        return self._state


_numpy_random, _python_random = _NumpyRandom(), _PythonRandom()


class _Start:
    """The state at the beginning of a step, as far as the step changes it."""

    def __init__(self, current: runtime.Runtime, has_run: bool) -> None:
        self._current, steps = current, current.steps
        self._has_run = has_run
        self._engine_marks = [(engine, engine.marks) for engine in self._engines()]
        self._counts = (steps.num_begun, steps.num_finished, steps.num_passes)
        self._marks = (steps.has_trained, steps.has_gradients, steps.missed_at)
        self._partitioned = set(current.wrapped.partitioned)
        self._random = _C.RandomState.capture(str(current.rank.device))
        self._python = _python_random.state()
        self._numpy = _numpy_random.state()
        self._buffers = [(b, b.detach().clone()) for b in self._own_buffers()]

    def _engines(self) -> Sequence[Engine]:
        return list(self._current.wrapped.engines.values())

    def _own_buffers(self) -> list[Tensor]:
        if not torch.is_grad_enabled():
            return []  # a step without gradients leaves running statistics as they are
        left, found = [engine.root for engine in self._engines()], list[Tensor]()
        while left:  # `Module.buffers` would take ten times as long, in each step
            module = left.pop()
            left += [child for child in module._modules.values() if child is not None]
            found += [buffer for buffer in module._buffers.values() if buffer is not None]
        return found

    @property
    def obstacle(self) -> str | None:
        """Reason why the state at the beginning cannot be restored or given; None: it can."""
        if not self._has_run or self._current.wrapped.partitioned != self._partitioned:
            return (
                "it is the first call of this function, in which models are laid out on their "
                "ranks and checked"
            )
        if self._marks[1]:
            return (
                "gradients of an earlier step were not used by an optimizer of smp yet, and are "
                "lost"
            )
        return None

    def can_be_given(self) -> bool:
        """Returns whether a process that joins could begin with this state."""
        wrapped = self._current.wrapped
        return self.obstacle is None and len(wrapped.engines) == len(wrapped.models)

    def refuse_lost(self, name: str, error: BaseException) -> None:
        """Raises the failure if the state at the beginning cannot be restored."""
        if self.obstacle is not None:
            raise RuntimeError(
                f"{_C.rank_prefix()}step '{name}' cannot be run again after the failure of "
                f"another rank, because {self.obstacle}; resume from a checkpoint"
            ) from error

    def restore(self) -> None:
        """Restores counts, random states and buffers, and drops gradients."""
        steps = self._current.steps
        steps.num_begun, steps.num_finished, steps.num_passes = self._counts
        steps.has_trained, steps.has_gradients, steps.missed_at = self._marks
        for engine, marks in self._engine_marks:
            engine.restore_marks(marks)
        self._random.restore()
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        if torch.is_grad_enabled():
            for engine in self._engines():
                for parameter in engine.root.parameters():
                    parameter.grad = master_of(parameter).grad = None
            for optimizer in self._current.wrapped.optimizers:
                optimizer._gradients_used(optimizer._engines())
