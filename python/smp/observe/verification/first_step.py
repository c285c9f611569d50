"""Checks the first training step of a partitioned model, from its partition to its verdict.

See docs/design/verify.md.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import smp._C as _C
from smp import data_parallel
from smp.modules.materialize import is_placeholder
from smp.modules.packed import is_packed
from smp.observe.verification.first_microbatch import FirstMicrobatch
from smp.observe.verification.first_step_verdict import Seen, Verdict, judge, mean_of
from smp.observe.verification.memory_needed import reason_not_to_fit
from smp.observe.verification.recorder import is_compiled
from smp.observe.verification.reference import Reference, draws_by_setting
from smp.observe.verification.rows import Stamp, are_near, stamp
from smp.partition.costs import Trace
from smp.tensor_parallel.sharding import interval_of
from smp.world import comm, runtime
from smp.world.observers import StepObserver

_log = logging.getLogger("smp")

_NEAR = 1e-6  # share by which a stamp depends on the order of summation


class FirstStepDifference(RuntimeError):
    """The pipeline computes something else than one process."""


class FirstStepCheck(StepObserver):
    """The check of one model on one rank, which observes steps until its outcome is known.

    All ranks of the job have such a check, and agree on whether it is on.

    Args:
        current: the runtime.
        root: the user's model.
        label: name of the model in messages.

    Attributes:
        outcome: the result in words; None while there is none.
    """

    def __init__(self, current: runtime.Runtime, root: nn.Module, label: str) -> None:
        self._current = current
        self._root = root
        self._label = label
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._stamps: list[Stamp] = []
        self._made: dict[str, Stamp] = {}  # stamps from before the partition
        self._modules: dict[str, nn.Module] = {}
        self._local: dict[str, nn.Parameter] = {}
        self._reason: str | None = None  # why this rank cannot take part
        self._watched: FirstMicrobatch | None = None
        self.outcome: str | None = None

    # ---- partition

    @property
    def _is_driver(self) -> bool:
        return self._current.rank.ranks["pp"] == 0

    @property
    def _takes_part(self) -> bool:
        """Returns whether this is the first replica; others do the same with other data."""
        return self._current.rank.ranks["rdp"] == 0

    @property
    def _is_compared(self) -> bool:
        """Returns whether this rank's results are compared.

        Context-parallel peers compute results in parts with it; their gradients are added.
        """
        return self._current.rank.ranks["rdp_cp"] == 0

    def before_placing(
        self,
        trace: Trace | None,
        local: Sequence[tuple[str, nn.Parameter]],
        shows_values: bool,
    ) -> None:
        """Keeps the values of the whole model on ranks that will run it as a whole.

        Args:
            trace: trace of the model, on the first rank, or None.
            local: parameters of this rank.
            shows_values: see `Storage`.
        """
        self._local = dict(local)
        self._reason = self._reason_against(trace, shows_values)
        # The ranks of a tensor-parallel group take whole parameters of its first one.
        keeps = self._takes_part or self._current.rank.sizes["tp"] > 1
        if self._is_driver and self._reason is None and keeps:
            self._kept = {p: p.data for p in self._root.parameters()}
        if self._reason is None and self._is_compared:
            known = self._root.named_parameters() if self._is_driver else local
            self._made = {name: stamp(p) for name, p in known}
            self._made |= _stamps_of_state(self._root)

    def _reason_against(self, trace: Trace | None, shows_values: bool) -> str | None:
        current = self._current
        setting = current.rank.settings.check_first_step
        if setting == "0":
            return "SMP_CHECK_FIRST_STEP is 0"
        if current.rank.sizes["pp"] == 1:
            return "there is one partition"
        if not shows_values:
            return "parameters are sharded over replicas"
        if current.rank.config.orders_replicas and current.rank.sizes["rdp"] > 1:
            return "the replicas do all in one order, and one of them is checked"
        if any(is_lazy(p) or p.is_meta for p in self._root.parameters()):
            return "values of the model are made when it is partitioned"
        if any(map(is_packed, self._root.parameters())):
            return "weights are quantized, and the whole model is on no rank"
        if any(map(is_placeholder, self._root.parameters())):
            return "an earlier wrapper has partitioned the model"
        if setting == "auto" and self._is_driver:
            return reason_not_to_fit(
                self._root, current.rank.device, current.rank.local_size, trace
            )
        return None

    def model_placed(self, engine: Any) -> None:
        """Compares the parameters of replicas. Collective over all ranks.

        Raises:
            FirstStepDifference: replicas hold different values; raised on all ranks.
        """
        if engine.root is not self._root:
            return
        if self._current.rank.sizes["pp"] == 1:
            self._end("off: there is one partition")
            return
        reason = _first(comm.allgather(self._reason, comm.WORLD))
        if reason is not None:
            self._end(f"off: {reason}")
            return
        decision = engine.partitioning.decision
        self._modules = dict(zip(decision.names, decision.modules, strict=True))
        self._stamps = self._stamps_now()
        self._compare_replicas()
        for parameter in self._local.values():
            self._kept.pop(parameter, None)
        if self._current.rank.sizes["tp"] > 1 and self._is_driver:
            whole = [value for p, value in self._kept.items() if interval_of(p) is None]
            data_parallel.broadcast_from_first(self._current.rank, whole)
        if not self._takes_part:
            self._kept.clear()
        self._compare_makers()

    def _stamps_now(self) -> list[Stamp]:
        return [stamp(t) for t in (*self._local.values(), *self._root.buffers())]

    def _compare_makers(self) -> None:
        """Ends the check if ranks drew values that differ from those of the whole model."""
        name = self._made_otherwise() if self._is_compared else None
        (name, *_) = comm.allgather(name, comm.CP_GROUP)
        if name is not None:
            self._end(f"inconclusive: ranks have made other values of '{name}'")

    def _made_otherwise(self) -> str | None:
        ranks = self._current.rank.ranks
        told = comm.allgather((ranks["tp"], self._is_driver, self._made), comm.MP_GROUP)
        split = {n for n, p in self._root.named_parameters() if interval_of(p) is not None}
        for tp_rank, is_driver, expected in told:
            # Whole parameters count on the first tensor-parallel rank only.
            counted = {n: v for n, v in expected.items() if tp_rank == 0 or n in split}
            peers = [made for tp, driver, made in told if tp == tp_rank and not driver]
            name = _first([_other(counted, made) for made in peers])
            if is_driver and name is not None:
                return name
        return None

    def _compare_replicas(self) -> None:
        own = {name: stamp(p) for name, p in self._local.items() if interval_of(p) is None}
        first, *others = comm.allgather(own, comm.CommGroup.DP_CP_GROUP)
        complaint = None
        for rank, other in zip(self._current.rank.groups["dp_cp"][1:], others, strict=True):
            name = _other(first, other)
            if name is not None and complaint is None:
                complaint = f"parameter '{name}' has other values on global_rank {rank}"
        complaint = _first(comm.allgather(complaint, comm.WORLD))
        if complaint is not None:
            self._end(f"differs: {complaint}")
            raise FirstStepDifference(
                f"{_C.rank_prefix()}the replicas of {self._label} do not begin alike: "
                f"{complaint} than on the first rank; look for code that writes to "
                "parameters while the model is partitioned (SMP_CHECK_FIRST_STEP=0 trains "
                "in spite of this)"
            )

    # ---- the step

    def begin_step(self, engines: Sequence[Any], trains: bool) -> None:
        """Begins to watch. Collective over the ranks of the replica for the first step."""
        if not any(engine.root is self._root for engine in engines):
            return
        if not trains:
            self._end("off: the first step does not train")
        elif len(engines) > 1:
            self._end("off: several models take part in the first step")
        elif not self._takes_part:
            self._end("off: the first replica is checked")
        else:
            reason = _first(comm.allgather(self._doubt(), comm.CP_GROUP))
            reason = _first(comm.allgather(reason, comm.MP_GROUP))
            if reason is not None:
                self._end(f"inconclusive: {reason}")
                return
            reference = None
            if self._is_driver:  # on all of them, as they fetch results in one order
                device = self._current.rank.device
                reference = Reference(self._root, self._modules, self._kept, device)
            watched = (self._root, self._modules, self._local, reference)
            self._watched = FirstMicrobatch(self._current, *watched)

    def _doubt(self) -> str | None:
        """Returns a reason why this rank's part of the step has nothing to compare with."""
        drawing = draws_by_setting(self._modules.values())
        if drawing is not None:
            return f"it draws random numbers: {drawing}"
        if any(map(is_compiled, self._modules.values())):
            return "parts of the model are compiled, and would be compiled again"
        if not all(map(are_near, self._stamps, self._stamps_now())):
            return "values of parameters or buffers have changed since the partition"
        return None

    def call(self, engine: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        watched = self._watched
        if watched is None:
            return forward
        return lambda *args, **kwargs: watched.call(forward, args, kwargs)

    def backward(self, engine: Any, losses: Sequence[Any]) -> None:
        if self._watched is not None:
            self._watched.note_backward(losses)

    def around_body(self, body: Callable[[int], None]) -> Callable[[int], None]:
        watched = self._watched
        return body if watched is None else lambda mb: watched.run_body(body, mb)

    # ---- verdict

    def end_step(self) -> None:
        """Compares at the end of the step. Collective over the ranks of the replica.

        Raises:
            FirstStepDifference: there is a difference; raised on all ranks of the replica.
        """
        watched = self._watched
        if watched is None:
            return
        watched.stop()
        own = mean_of(comm.allgather(watched.seen(), comm.CP_GROUP))
        verdict = self._verdict(watched, own) if self._is_compared else None
        (verdict, *_) = comm.allgather(verdict, comm.CP_GROUP)
        assert verdict is not None
        if verdict.reason is not None:
            self._end(f"inconclusive: {verdict.reason}")
        elif verdict.difference is None:
            self._end("equal")
        else:
            self._end(f"differs: {verdict.difference}")
            _wait_for_verdicts()
            raise FirstStepDifference(
                f"{_C.rank_prefix()}the first training step of {self._label} does not compute what "
                f"one process computes: {verdict.difference}. Training would go on with other "
                "numbers without a word, so it ends here. Keep what differs on the rank of its "
                "caller (smp.set_partition, or smp.partition), or set SMP_CHECK_FIRST_STEP=0 to "
                "train in spite of this; see docs/design/verify.md"
            )

    def _verdict(self, watched: FirstMicrobatch, own: Seen) -> Verdict:
        """Returns the verdict of the ranks of a replica. Collective over these."""
        seen = comm.allgather(own, comm.MP_GROUP)
        verdict = judge(seen)
        if verdict.difference is None:
            return verdict
        reasons, moved = zip(*comm.allgather(watched.again(), comm.MP_GROUP), strict=True)
        reason = _first(reasons)
        if reason is None:
            verdict = judge(seen, moved)
            if verdict == Verdict():
                reason = "one process makes as much of other last digits of its parameters"
        return verdict if reason is None else Verdict(reason=reason)

    def model_closed(self, engine: Any) -> None:
        if engine.root is self._root and self.outcome is None:
            self._end("off: the first step never came")

    def abandon_step(self) -> None:
        if self._watched is not None:
            self._watched.stop()
            self._end("off: the first step failed")

    def _end(self, outcome: str) -> None:
        """Keeps only the outcome, and stops observing."""
        self.outcome = outcome
        self._current.observers.remove(self)
        level = logging.DEBUG
        if self._current.rank.settings.check_first_step == "1" and not outcome.startswith(
            "off: the f"
        ):
            level = logging.INFO if outcome == "equal" else logging.WARNING
        if self._current.rank.global_rank == 0:
            _log.log(level, "smp: check of the first training step of %s: %s", self._label, outcome)
        self._root = nn.Module()  # the outcome outlives the model
        self._kept, self._local, self._modules, self._made = {}, {}, {}, {}
        self._watched = None


def _wait_for_verdicts() -> None:
    """Waits until all ranks of the replica have the verdict; the first error ends all waits."""
    with contextlib.suppress(_C.PeerFailure):  # another rank was through, so all have it
        comm.barrier(comm.MP_GROUP)
        comm.barrier(comm.CP_GROUP)


def _first(reasons: Sequence[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _other(expected: Mapping[str, Stamp], values: Mapping[str, Stamp]) -> str | None:
    """Returns the first name whose values differ by more than the order of summation, or None."""
    known = (name for name in values if name in expected)
    return next((n for n in known if not are_near(expected[n], values[n], _NEAR)), None)


def _stamps_of_state(root: nn.Module) -> dict[str, Stamp]:
    """Returns stamps of buffers, and of tensors that are attributes."""
    return {
        f"{name}.{key}": stamp(value)
        for name, module in root.named_modules()
        for key, value in (*module._buffers.items(), *module.__dict__.items())
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }


class FirstStepObserver(StepObserver):
    """Adds a `FirstStepCheck` for each model when its parameters are about to move.

    Attributes:
        checks: check of each model by its engine; those that are over stay for their outcome.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current
        self.checks: WeakKeyDictionary[Any, FirstStepCheck] = WeakKeyDictionary()

    def model_placing(self, engine: Any, trace: Any, local: Sequence[tuple[str, Any]]) -> None:
        label = f"model {engine.idx} ({type(engine.root).__name__})"
        check = self.checks[engine] = FirstStepCheck(self._current, engine.root, label)
        self._current.observers.add(check)
        check.before_placing(trace, local, engine.storage.shows_values)


def outcome_of(model: Any) -> str | None:
    """Returns the outcome of the check of a `DistributedModel` in words; None: it is not over."""
    observer: FirstStepObserver = model._runtime.observers.of_kind(FirstStepObserver)
    return observer.checks[model._engine].outcome
