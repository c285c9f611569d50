"""Records the first microbatch of a model's first step, in the pipeline and in one process."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import smp._C as _C
from smp.modules.tracing import is_tracing
from smp.observe.verification import first_step_verdict as judging
from smp.observe.verification.comparison import Stage
from smp.observe.verification.first_step_verdict import OneProcess, Seen
from smp.observe.verification.outputs import Inconclusive, RealCalls, form_of
from smp.observe.verification.recorder import ModuleRecorder
from smp.observe.verification.reference import Reference
from smp.observe.verification.rows import Row, row_of
from smp.pipeline.remote_tensor import RemoteTensor
from smp.world import runtime

_log = logging.getLogger("smp")


class FirstMicrobatch:
    """The recorder of one rank, from the first step's begin to its end.

    A failure of the run in one process is a reason for no result, and the step goes on.

    Args:
        current: the runtime.
        root: the user's model.
        modules: all of its modules, by name.
        local: parameters of this rank, by name.
        reference: the model in one process, on the driver, or None.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        root: nn.Module,
        modules: Mapping[str, nn.Module],
        local: Mapping[str, nn.Parameter],
        reference: Reference | None,
    ) -> None:
        self._rank, self._root = current.rank, root
        self._reason: str | None = None
        self._recorder = ModuleRecorder(_recorded_microbatch)
        self._gradients: dict[str, Row | None] = {}
        self._reference = reference
        self._real = None if reference is None else RealCalls(root)
        self._incoming: dict[tuple[int, int], Tensor] = {}
        self._outputs = Stage()
        self._found: OneProcess | None = None
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._recorder.watch(list(modules.values()), list(modules)))
        for name, parameter in local.items():
            if parameter.requires_grad:
                self._gradients[name] = None
                self._hook(name, parameter)
        if current.pipeline is not None:
            current.pipeline.keep_first_apart(True)
            self._undo.callback(current.pipeline.keep_first_apart, False)

    def stop(self) -> None:
        """Removes wrappers and hooks."""
        self._undo.close()

    # ---- the microbatch

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

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the model; on the driver it runs in this process alone before that."""
        real, reference = self._real, self._reference
        if real is None or reference is None or _first_microbatch() is None:
            return forward(*args, **kwargs)
        with self._or_reason():
            reference.run((args, kwargs))
        output = forward(*args, **kwargs)
        if self._reason is None:
            real.note_call((args, kwargs), output)
        return output

    def note_backward(self, losses: Sequence[Any]) -> None:
        """Records that a backward begins, on the driver."""
        if self._real is not None and self._reason is None and _first_microbatch() is not None:
            with self._or_reason():
                self._real.note_backward(losses)

    def run_body(self, body: Callable[[int], None], mb: int) -> None:
        """Runs the body of a step; ends the run in one process behind the first microbatch."""
        body(mb)
        real, reference = self._real, self._reference
        if mb == 0 and real is not None and reference is not None:
            with self._or_reason():
                self._finish(real, reference)

    def _finish(self, real: RealCalls, reference: Reference) -> None:
        if not reference.calls:
            raise Inconclusive("the step function does not call the model in its first microbatch")
        real.fetch()
        self._incoming = real.incoming()
        self._outputs = _outputs_of(
            [[(output.form, output.row) for output in call] for call in real.outputs]
        )
        is_certain = real.are_independent()
        real.forget()
        self._found = self._computed(reference, real.has_backward)
        self._found.is_certain &= is_certain

    def _computed(self, reference: Reference, has_backward: bool) -> OneProcess:
        """Runs the backward of a reference, and returns what it has computed."""
        dtypes = {p.dtype for p in self._root.parameters()} | reference.rounded
        for call in reference.calls:
            dtypes |= {dtype for _, dtype in call.casts}
            dtypes |= {leaf.dtype for leaf in call.leaves if isinstance(leaf, Tensor)}
        stage = _outputs_of(
            [[(form_of(leaf), row_of(leaf)) for leaf in call.leaves] for call in reference.calls]
        )
        if has_backward:
            names = {p: name for name, p in self._root.named_parameters()}
            for parameter, grad in reference.gradients(self._incoming).items():
                row = row_of(grad)
                if row is not None:
                    stage.items["gradient", names[parameter]] = row.numbers.cpu()
        reference.forget_graph()
        return OneProcess(
            stage=stage,
            rows=reference.recorder.take(),
            limit=judging.limit_of(dtypes),
            is_certain=reference.is_certain,
            has_backward=has_backward,
        )

    @contextlib.contextmanager
    def _or_reason(self) -> Iterator[None]:
        """Turns a failure of the run in one process into a reason, so that the step goes on."""
        try:
            yield
        except Inconclusive as reason:
            self._give_up(str(reason))
        except Exception as error:
            text = next(iter(str(error).strip().splitlines()), "")
            _log.debug("smp: the run in one process failed", exc_info=error)
            self._give_up(f"the model cannot be run a second time: {type(error).__name__}: {text}")

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._reference = None
        if self._real is not None:
            self._real.forget()
        self._incoming.clear()

    # ---- results

    def seen(self) -> Seen:
        """Returns the observations of this rank."""
        rank = self._rank
        place = f"global_rank {rank.global_rank} ({rank.place})"
        seen = Seen(place=place, tp_rank=rank.ranks["tp"], reason=self._reason)
        if self._reason is None:
            for name, row in self._gradients.items():
                seen.gradients[name] = None if row is None else row.numbers.cpu()
            seen.rows = self._recorder.take()
            seen.outputs, seen.one = self._outputs, self._found
        return seen

    def again(self) -> tuple[str | None, OneProcess | None]:
        """Runs the reference twice again, as it was and with other last digits of all parameters.

        Returns:
            a reason why it gives no result, or None; and what it has computed with other digits, or
            None. Both are None without a reference.
        """
        reference, found = self._reference, self._found
        if reference is None or found is None:
            return None, None
        moved, has_backward = None, found.has_backward
        with self._or_reason(), torch.enable_grad():
            if not judging.agrees(found, self._computed(reference.again(), has_backward)):
                raise Inconclusive("one process does not compute the same twice")
        if self._reason is not None:
            return self._reason, None
        with self._or_reason(), torch.enable_grad():
            moved = self._computed(reference.again(moved=True), has_backward)
            moved.rows = {}  # these are not needed
        return None, moved


def _remove(parameter: nn.Parameter, handle: RemovableHandle, had_none: bool) -> None:
    handle.remove()
    if had_none and not parameter._backward_hooks:
        parameter._backward_hooks = None  # later backwards skip it


def _first_microbatch() -> int | None:
    return 0 if _C.current_microbatch() == 0 else None


def _recorded_microbatch() -> int | None:
    return None if is_tracing() else _first_microbatch()


def _outputs_of(calls: Sequence[Sequence[tuple[str, Row | None]]]) -> Stage:
    """Returns forms and numbers of the outputs of all calls as a stage."""
    stage = Stage()
    for number, leaves in enumerate(calls):
        times = f" of call {number}" if number else ""
        stage.facts["form", f"the output{times}"] = f"{len(leaves)} values"
        for position, (form, row) in enumerate(leaves):
            name = f"output {position}{times}"
            stage.facts["form", name] = form
            if row is not None:
                stage.items["output", name] = row.numbers.cpu()
    return stage
