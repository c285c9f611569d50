"""Checks the first training step of a partitioned model, from its partition to its verdict.

See docs/design/first_step.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

import smp._C as _C
from smp import data_parallel
from smp.modules.materialize import is_placeholder
from smp.observe.first_step import verdict as judging
from smp.observe.first_step.memory_needed import reason_not_to_fit
from smp.observe.first_step.records import Records, is_compiled, watch_modules
from smp.observe.first_step.reference import Inconclusive, Reference, draws_by_setting
from smp.observe.first_step.sketch import is_plain, sketch, stamp
from smp.observe.first_step.watch import RealCalls, describe_leaf
from smp.partition.costs import Trace
from smp.pipeline.remote_tensor import RemoteTensor
from smp.tensor_parallel.sharding import interval_of
from smp.world import comm, runtime
from smp.world.observers import StepObserver

_log = logging.getLogger("smp")

_SMALL = 4096  # elements of an output that is always compared itself


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
        self._modules: Sequence[nn.Module] = ()
        self._names: Sequence[str] = ()
        self._local: dict[str, nn.Parameter] = {}
        self._is_watching = False
        self._reason: str | None = None  # why this rank has no result
        self._records = Records(_in_first_microbatch)
        self._gradients: dict[str, Tensor | None] = {}
        self._undo: list[Callable[[], None]] = []
        self._real: RealCalls | None = None
        self._reference: Reference | None = None
        self._incoming: dict[tuple[int, int], Tensor | None] = {}
        self._found: judging.ReferenceSeen | None = None
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
        reasons = comm.allgather(self._reason, comm.WORLD)
        reason = next((r for r in reasons if r is not None), None)
        if reason is not None:
            self._end(f"off: {reason}")
            return
        decision = engine.partitioning.decision
        self._modules, self._names = decision.modules, decision.names
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
                if counts and not _is_near(expected.get(name, value), value):
                    self._end(f"inconclusive: ranks have made other values of '{name}'")
                    return

    def _compare_replicas(self) -> None:
        own = [(name, stamp(p)) for name, p in self._local.items() if interval_of(p) is None]
        first, *others = comm.allgather(own, comm.DP_GROUP)
        complaint = None
        for rank, other in zip(self._current.rank.groups["dp"][1:], others, strict=True):
            for (name, expected), (_, value) in zip(first, other, strict=False):
                if not _is_near(expected, value) and complaint is None:
                    complaint = f"parameter '{name}' has other values on global_rank {rank}"
        complaints = [c for c in comm.allgather(complaint, comm.WORLD) if c is not None]
        if complaints:
            self._end(f"differs: {complaints[0]}")
            raise FirstStepDifference(
                f"{_C.rank_prefix()}the replicas of {self._label} do not begin alike: "
                f"{complaints[0]} than on the first rank; look for code that writes to "
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
            reason = draws_by_setting(self._modules)
            if reason is not None:
                reason = f"it draws random numbers: {reason}"
            elif any(map(is_compiled, self._modules)):
                reason = "parts of the model are compiled, and would be compiled again"
            elif not all(map(_is_same, self._stamps, self._stamps_now())):
                reason = "values of parameters or buffers have changed since the partition"
            reasons = comm.allgather(reason, comm.MP_GROUP)
            reason = next((r for r in reasons if r is not None), None)
            if reason is not None:
                self._end(f"inconclusive: {reason}")
            else:
                self._watch()

    def _watch(self) -> None:
        self._is_watching = True
        self._undo.append(watch_modules(self._modules, self._records))
        for name, parameter in self._local.items():
            if parameter.requires_grad:
                self._gradients[name] = None
                had_none = parameter._backward_hooks is None
                handle = parameter.register_hook(functools.partial(self._note_gradient, name))
                # The hook runs before hooks of the user, which may change gradients. PyTorch calls
                # hooks in the order of insertion, whatever an OrderedDict's own order is.
                table = parameter._backward_hooks
                assert table is not None
                *others, own = list(table.items())
                table.clear()
                table.update([own, *others])
                self._undo.append(functools.partial(_remove, parameter, handle, had_none))
        self._keep_apart(True)
        if self._is_driver:
            self._real = RealCalls(self._root)
            self._reference = Reference(
                self._root, self._modules, self._kept, self._current.rank.device
            )

    def _keep_apart(self, apart: bool) -> None:
        if self._current.pipeline is not None:
            self._current.pipeline.keep_first_apart(apart)

    def _note_gradient(self, name: str, grad: Tensor | None) -> None:
        # The gradient of a custom function may be None.
        if grad is None or self._reason is not None or not _in_first_microbatch():
            return
        with self._or_reason():
            if isinstance(grad, RemoteTensor):
                grad = grad._data()  # the reduction wants it next
            if not is_plain(grad):
                raise Inconclusive(f"the gradient of '{name}' is no dense tensor")
            known = self._gradients[name]
            self._gradients[name] = sketch(grad) if known is None else known + sketch(grad)

    def call(self, engine: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(forward, args, kwargs)

    def _call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the model on the driver; before that, runs it in this process alone."""
        real, reference = self._real, self._reference
        is_checked = real is not None and self._reason is None and _in_first_microbatch()
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
        if self._real is not None and self._reason is None and _in_first_microbatch():
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
    def _or_reason(self) -> Any:
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
        unknown = [
            (number, position)
            for number, call in enumerate(reference.calls)
            for position, leaf in enumerate(call.leaves)
            if isinstance(leaf, Tensor)
            and (leaf.numel() <= _SMALL or reference.records.maker(leaf) is None)
            and position < len(real.outputs[number])
        ]
        real.fetch(unknown)
        self._incoming = real.incoming()
        outputs, has_backward = self._outputs(real, reference), real.has_backward
        is_certain = real.are_independent()
        real.forget()
        self._found = self._seen_of(reference, outputs, has_backward)
        self._found.is_certain &= is_certain

    def _outputs(self, real: RealCalls, reference: Reference) -> list[judging.OutputSeen]:
        seen = []
        for number, call in enumerate(reference.calls):
            times = f" of call {number}" if number else ""
            values = real.outputs[number]
            if len(values) != len(call.leaves):
                kinds = ("value", f"{len(values)} values"), ("value", f"{len(call.leaves)} values")
                seen.append(judging.OutputSeen(f"the output{times}", kinds, (None, None), None))
                continue
            for position, (value, leaf) in enumerate(zip(values, call.leaves, strict=True)):
                is_tensor = isinstance(leaf, Tensor)
                sketches = (
                    None if value.sketch is None else value.sketch.cpu(),
                    sketch(leaf).cpu() if is_plain(leaf) else None,
                )
                seen.append(
                    judging.OutputSeen(
                        f"output {position}{times}",
                        (describe_leaf(value.value), describe_leaf(leaf)),
                        sketches,
                        reference.records.maker(leaf) if is_tensor else None,
                    )
                )
        return seen

    def _seen_of(
        self, reference: Reference, outputs: list[judging.OutputSeen], has_backward: bool
    ) -> judging.ReferenceSeen:
        gradients = None
        if has_backward:
            names = {p: name for name, p in self._root.named_parameters()}
            found = reference.gradients(self._incoming)
            gradients = {
                names[p]: None if grad is None else sketch(grad).cpu() for p, grad in found.items()
            }
        dtypes = {p.dtype for p in self._root.parameters()}
        dtypes |= {dtype for call in reference.calls for _, dtype in call.casts}
        leaves = [leaf for call in reference.calls for leaf in call.leaves]
        dtypes |= {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)} | reference.rounded
        own_outputs = [sketch(leaf).cpu() if is_plain(leaf) else None for leaf in leaves]
        reference.forget_graph()
        return judging.ReferenceSeen(
            tolerance=judging.tolerance_of(dtypes),
            outputs=outputs,
            own_outputs=own_outputs,
            gradients=gradients,
            is_certain=reference.is_certain,
            records=reference.records.on_host(),
            names=self._names,
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
            reasons = comm.allgather(self._doubt(), comm.MP_GROUP)
            reason = next((r for r in reasons if r is not None), None)
            if reason is None:
                verdict = judging.judge(seen, comm.allgather(self._moved(), comm.MP_GROUP))
                if verdict == judging.Verdict():
                    reason = "one process makes as much of other last digits of its parameters"
            if reason is not None:
                verdict = judging.Verdict(reason=reason)
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
                "train in spite of this; see docs/design/first_step.md"
            )

    def _seen(self) -> judging.Seen:
        current = self._current
        ranks = current.rank.ranks
        seen = judging.Seen(
            place=f"global_rank {current.rank.global_rank} (pp {ranks['pp']} tp {ranks['tp']} "
            f"rdp {ranks['rdp']})",
            pp_rank=ranks["pp"],
            tp_rank=ranks["tp"],
            reason=self._reason,
        )
        if self._reason is None:
            seen.gradients = {n: None if g is None else g.cpu() for n, g in self._gradients.items()}
            seen.records = self._records.on_host()
            seen.reference = self._found
        return seen

    def _doubt(self) -> str | None:
        """Runs the reference again, if there is one; returns why it gives no result, or None."""
        reference, found = self._reference, self._found
        if reference is None or found is None:
            return None
        with self._or_reason(), torch.enable_grad():
            again = reference.again()
            second = self._seen_of(again, [], found.gradients is not None)
            if not judging.agrees(found, second):
                return "one process does not compute the same twice"
        return self._reason

    def _moved(self) -> judging.ReferenceSeen | None:
        """Runs the reference with other last digits of all parameters, if there is one."""
        reference, found = self._reference, self._found
        if reference is None or found is None:
            return None
        with self._or_reason(), torch.enable_grad():
            again = reference.again(moved=True)
            seen = self._seen_of(again, [], found.gradients is not None)
            return dataclasses.replace(seen, records={})  # these are not needed
        return None

    def model_closed(self, engine: Any) -> None:
        if engine.root is self._root and self.outcome is None:
            self._end("off: the first step never came")

    def abandon_step(self) -> None:
        if self._is_watching:
            self._stop()
            self._end("off: the first step failed")

    def _stop(self) -> None:
        self._is_watching = False
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._keep_apart(False)

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
        self._kept, self._local, self._modules, self._made = {}, {}, (), {}
        self._reference = self._real = self._found = None
        self._records = Records(_in_first_microbatch)
        self._gradients, self._incoming = {}, {}


def _remove(parameter: nn.Parameter, handle: RemovableHandle, had_none: bool) -> None:
    handle.remove()
    if had_none and not parameter._backward_hooks:
        parameter._backward_hooks = None  # later backwards skip it


def _in_first_microbatch() -> bool:
    return _C.current_microbatch() == 0


def _stamps_of_state(root: nn.Module) -> dict[str, tuple[float, float]]:
    """Returns stamps of buffers, and of tensors that are attributes."""
    return {
        f"{name}.{key}": stamp(value)
        for name, module in root.named_modules()
        for key, value in (*module._buffers.items(), *module.__dict__.items())
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }


def _is_same(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(first, second, strict=True))


def _is_near(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Returns whether two stamps are equal up to the order of summation."""
    bound = 1e-6 * max(map(abs, (*first, *second)))
    return _is_same(first, second) or all(
        abs(a - b) <= bound for a, b in zip(first, second, strict=True)
    )
