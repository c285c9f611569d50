"""Checks the first training step of a partitioned model, from its partition to its verdict.

See docs/design/verify.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

import smp._C as _C
from smp import data_parallel
from smp.modules.materialize import is_placeholder
from smp.observe.verification import first_step_verdict as judging
from smp.observe.verification.comparison import Stage
from smp.observe.verification.first_step_verdict import OneProcess, Seen, Verdict
from smp.observe.verification.memory_needed import reason_not_to_fit
from smp.observe.verification.outputs import Inconclusive, RealCalls, form_of
from smp.observe.verification.recorder import ModuleRecorder, is_compiled
from smp.observe.verification.reference import Reference, draws_by_setting
from smp.observe.verification.rows import Row, are_near, row_of, stamp
from smp.partition.costs import Trace
from smp.pipeline.remote_tensor import RemoteTensor
from smp.tensor_parallel.sharding import interval_of
from smp.world import comm, runtime
from smp.world.observers import StepObserver

_log = logging.getLogger("smp")

_SMALL = 4096  # elements of an output that is always compared itself
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
        self._stamps: list[tuple[float, float]] = []
        self._made: dict[str, tuple[float, float]] = {}  # stamps from before the partition
        self._modules: dict[str, nn.Module] = {}
        self._local: dict[str, nn.Parameter] = {}
        self._is_watching = False
        self._reason: str | None = None  # why this rank has no result
        self._recorder = ModuleRecorder(_first_microbatch)
        self._gradients: dict[str, Row | None] = {}
        self._undo = contextlib.ExitStack()
        self._real: RealCalls | None = None
        self._reference: Reference | None = None
        self._incoming: dict[tuple[int, int], Tensor] = {}
        self._outputs = Stage()
        self._found: OneProcess | None = None
        self.outcome: str | None = None

    # ---- partition

    @property
    def _is_driver(self) -> bool:
        return self._current.rank.ranks["pp"] == 0

    @property
    def _takes_part(self) -> bool:
        """Returns whether this is the first replica; others do the same with other data."""
        return self._current.rank.ranks["rdp"] == 0

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
        if self._reason is None and self._takes_part:
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
        else:
            self._compare_makers()

    def _stamps_now(self) -> list[tuple[float, float]]:
        return [stamp(t) for t in (*self._local.values(), *self._root.buffers())]

    def _compare_makers(self) -> None:
        """Ends the check if ranks drew values that differ from those of the whole model."""
        ranks = self._current.rank.ranks
        told = comm.allgather((ranks["tp"], self._is_driver, self._made), comm.MP_GROUP)
        split = {n for n, p in self._root.named_parameters() if interval_of(p) is not None}
        for tp_rank, is_driver, expected in told:
            peers = [made for tp, driver, made in told if tp == tp_rank and not driver]
            for name, value in ((n, v) for made in peers for n, v in made.items()):
                # Whole parameters count on the first tensor-parallel rank only.
                counts = is_driver and (tp_rank == 0 or name in split)
                if counts and not are_near(expected.get(name, value), value, _NEAR):
                    self._end(f"inconclusive: ranks have made other values of '{name}'")
                    return

    def _compare_replicas(self) -> None:
        own = [(name, stamp(p)) for name, p in self._local.items() if interval_of(p) is None]
        first, *others = comm.allgather(own, comm.DP_GROUP)
        complaint = None
        for rank, other in zip(self._current.rank.groups["dp"][1:], others, strict=True):
            for (name, expected), (_, value) in zip(first, other, strict=False):
                if not are_near(expected, value, _NEAR) and complaint is None:
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
            reason = draws_by_setting(self._modules.values())
            if reason is not None:
                reason = f"it draws random numbers: {reason}"
            elif any(map(is_compiled, self._modules.values())):
                reason = "parts of the model are compiled, and would be compiled again"
            elif not all(map(are_near, self._stamps, self._stamps_now())):
                reason = "values of parameters or buffers have changed since the partition"
            reason = _first(comm.allgather(reason, comm.MP_GROUP))
            if reason is not None:
                self._end(f"inconclusive: {reason}")
            else:
                self._watch()

    def _watch(self) -> None:
        self._is_watching = True
        modules = list(self._modules.values())
        self._undo.callback(self._recorder.watch(modules, list(self._modules)))
        for name, parameter in self._local.items():
            if parameter.requires_grad:
                self._gradients[name] = None
                self._hook(name, parameter)
        if self._current.pipeline is not None:
            self._current.pipeline.keep_first_apart(True)
            self._undo.callback(self._current.pipeline.keep_first_apart, False)
        if self._is_driver:
            self._real = RealCalls(self._root)
            device = self._current.rank.device
            self._reference = Reference(self._root, self._modules, self._kept, device)

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        """Registers a hook that runs before hooks of the user, which may change gradients."""
        had_none = parameter._backward_hooks is None
        handle = parameter.register_hook(functools.partial(self._note_gradient, name))
        # PyTorch calls hooks in the order of insertion, whatever an OrderedDict's own order is.
        table = parameter._backward_hooks
        assert table is not None
        *others, own = list(table.items())
        table.clear()
        table.update([own, *others])
        self._undo.callback(_remove, parameter, handle, had_none)

    def _note_gradient(self, name: str, grad: Tensor | None) -> None:
        # The gradient of a custom function may be None.
        if grad is None or self._reason is not None or _first_microbatch() is None:
            return
        with self._or_reason():
            if isinstance(grad, RemoteTensor):
                grad = grad._data()  # the reduction wants it next
            row, known = row_of(grad), self._gradients[name]
            if row is None:
                raise Inconclusive(f"the gradient of '{name}' is no dense tensor")
            self._gradients[name] = row if known is None else known.plus(row)

    def call(self, engine: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(forward, args, kwargs)

    def _call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the model on the driver; before that, runs it in this process alone."""
        real, reference = self._real, self._reference
        is_checked = real is not None and self._reason is None and _first_microbatch() is not None
        if not is_checked:
            return forward(*args, **kwargs)
        assert real is not None and reference is not None
        with self._or_reason():
            reference.run((args, kwargs))
        output = forward(*args, **kwargs)
        if self._reason is None:
            real.note_call((args, kwargs), output)
        return output

    def backward(self, engine: Any, losses: Sequence[Any]) -> None:
        if self._real is not None and self._reason is None and _first_microbatch() is not None:
            with self._or_reason():
                self._real.note_backward(losses)

    def around_body(self, body: Callable[[int], None]) -> Callable[[int], None]:
        """Wraps the body of a step; the driver ends the check's run after its first microbatch."""
        if self._real is None:
            return body

        def run(mb: int) -> None:
            body(mb)
            if mb == 0:
                with self._or_reason():
                    self._finish_microbatch()

        return run

    @contextlib.contextmanager
    def _or_reason(self) -> Iterator[None]:
        """Turns a failure of the second run into a reason, so that the step goes on."""
        try:
            yield
        except Inconclusive as reason:
            self._give_up(str(reason))
        except Exception as error:
            lines = str(error).strip().splitlines()
            text = lines[0] if lines else ""
            _log.debug("smp: the second run of %s failed", self._label, exc_info=error)
            self._give_up(f"the model cannot be run a second time: {type(error).__name__}: {text}")

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._reference = None
        if self._real is not None:
            self._real.forget()
        self._incoming.clear()

    def _finish_microbatch(self) -> None:
        real, reference = self._real, self._reference
        if self._reason is not None or real is None or reference is None:
            return
        if not reference.calls:
            raise Inconclusive("the step function does not call the model in its first microbatch")
        found = reference.calls
        unknown = [
            (number, position)
            for number, call in enumerate(found)
            for position, leaf in enumerate(call.leaves[: len(real.outputs[number])])
            if isinstance(leaf, Tensor)
            and (leaf.numel() <= _SMALL or reference.recorder.maker(leaf) is None)
        ]
        real.fetch(unknown)
        self._incoming, has_backward = real.incoming(), real.has_backward
        self._outputs = _outputs_of(
            [[(output.form, output.row) for output in call] for call in real.outputs]
        )
        is_certain = real.are_independent()
        real.forget()
        self._found = self._computed(reference, has_backward)
        self._found.is_certain &= is_certain

    def _computed(self, reference: Reference, has_backward: bool) -> OneProcess:
        """Runs the backward of a reference, and returns what it has computed."""
        dtypes = {p.dtype for p in self._root.parameters()} | reference.rounded
        makers = {}
        for number, call in enumerate(reference.calls):
            dtypes |= {dtype for _, dtype in call.casts}
            dtypes |= {leaf.dtype for leaf in call.leaves if isinstance(leaf, Tensor)}
            for position, leaf in enumerate(call.leaves):
                maker = reference.recorder.maker(leaf)
                if maker is not None:
                    makers[_name_of(number, position)] = maker
        outputs = _outputs_of(
            [[(form_of(leaf), row_of(leaf)) for leaf in call.leaves] for call in reference.calls]
        )
        gradients = {}
        if has_backward:
            names = {p: name for name, p in self._root.named_parameters()}
            found = reference.gradients(self._incoming)
            gradients = {names[p]: _numbers(row_of(grad)) for p, grad in found.items()}
        reference.forget_graph()
        return OneProcess(
            outputs=outputs,
            makers=makers,
            gradients=gradients,
            rows=reference.recorder.take(),
            limit=judging.limit_of(dtypes),
            is_certain=reference.is_certain,
        )

    # ---- verdict

    def end_step(self) -> None:
        """Compares at the end of the step. Collective over the ranks of the replica.

        Raises:
            FirstStepDifference: there is a difference; raised on all ranks of the replica.
        """
        if not self._is_watching:
            return
        self._stop()
        seen = comm.allgather(self._seen(), comm.MP_GROUP)
        verdict = judging.judge(seen)
        if verdict.difference is not None:
            reasons, moved = zip(*comm.allgather(self._again(), comm.MP_GROUP), strict=True)
            reason = _first(reasons)
            if reason is None:
                verdict = judging.judge(seen, moved)
                if verdict == Verdict():
                    reason = "one process makes as much of other last digits of its parameters"
            if reason is not None:
                verdict = Verdict(reason=reason)
        if verdict.reason is not None:
            self._end(f"inconclusive: {verdict.reason}")
        elif verdict.difference is None:
            self._end("equal")
        else:
            self._end(f"differs: {verdict.difference}")
            raise FirstStepDifference(
                f"{_C.rank_prefix()}the first training step of {self._label} does not compute what "
                f"one process computes: {verdict.difference}. Training would go on with other "
                "numbers without a word, so it ends here. Keep what differs on the rank of its "
                "caller (smp.set_partition, or smp.partition), or set SMP_CHECK_FIRST_STEP=0 to "
                "train in spite of this; see docs/design/verify.md"
            )

    def _seen(self) -> Seen:
        rank = self._current.rank
        place = f"global_rank {rank.global_rank} ({rank.place})"
        seen = Seen(place=place, tp_rank=rank.ranks["tp"], reason=self._reason)
        if self._reason is None:
            seen.gradients = {name: _numbers(row) for name, row in self._gradients.items()}
            seen.rows = self._recorder.take()
            seen.outputs, seen.one = self._outputs, self._found
        return seen

    def _again(self) -> tuple[str | None, OneProcess | None]:
        """Runs the reference twice again, as it was and with other last digits of all parameters.

        Returns:
            a reason why it gives no result, or None, and what it has computed with other digits, or
            None; both None without a reference.
        """
        reference, found, moved = self._reference, self._found, None
        if reference is None or found is None:
            return None, None
        has_backward = bool(found.gradients)
        with self._or_reason(), torch.enable_grad():
            if not judging.agrees(found, self._computed(reference.again(), has_backward)):
                raise Inconclusive("one process does not compute the same twice")
        if self._reason is not None:
            return self._reason, None
        with self._or_reason(), torch.enable_grad():
            moved = self._computed(reference.again(moved=True), has_backward)
            moved.rows = {}  # these are not needed
        return None, moved

    def model_closed(self, engine: Any) -> None:
        if engine.root is self._root and self.outcome is None:
            self._end("off: the first step never came")

    def abandon_step(self) -> None:
        if self._is_watching:
            self._stop()
            self._end("off: the first step failed")

    def _stop(self) -> None:
        self._is_watching = False
        self._undo.close()

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
        self._reference = self._real = self._found = None
        self._recorder = ModuleRecorder(_first_microbatch)
        self._gradients, self._incoming, self._outputs = {}, {}, Stage()


def _remove(parameter: nn.Parameter, handle: RemovableHandle, had_none: bool) -> None:
    handle.remove()
    if had_none and not parameter._backward_hooks:
        parameter._backward_hooks = None  # later backwards skip it


def _first_microbatch() -> int | None:
    return 0 if _C.current_microbatch() == 0 else None


def _first(reasons: Sequence[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _outputs_of(calls: Sequence[Sequence[tuple[str, Row | None]]]) -> Stage:
    """Returns forms and numbers of the outputs of all calls as a stage."""
    stage = Stage()
    for number, leaves in enumerate(calls):
        stage.facts["form", f"the output{_times(number)}"] = f"{len(leaves)} values"
        for position, (form, row) in enumerate(leaves):
            name = _name_of(number, position)
            stage.facts["form", name] = form
            if row is not None:
                stage.items["output", name] = row.numbers.cpu()
    return stage


def _name_of(call: int, position: int) -> str:
    return f"output {position}{_times(call)}"


def _times(call: int) -> str:
    return f" of call {call}" if call else ""


def _numbers(row: Row | None) -> Tensor | None:
    return None if row is None else row.numbers.cpu()


def _stamps_of_state(root: nn.Module) -> dict[str, tuple[float, float]]:
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
