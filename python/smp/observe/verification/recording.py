"""Records what a script computes on one rank, for `smp verify`.

Nothing here communicates: a rank writes what it holds, with the marks of state dicts of one rank,
and the command joins the parts. See docs/design/verify.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.modules.tracing import is_tracing
from smp.observe.verification.arguments import KeptArguments
from smp.observe.verification.entering import Entering
from smp.observe.verification.order import Order
from smp.observe.verification.recorder import ModuleRecorder
from smp.observe.verification.rows import row_of
from smp.precision.grad_norm import refuse_without_gradients
from smp.precision.holdings import holding_of, master_of
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import MARKS
from smp.world import runtime
from smp.world.observers import StepObserver


class EndOfVerification(SystemExit):
    """The script has made the ordered number of updates; it ends with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class VerificationObserver(StepObserver):
    """Starts the recording that `smp verify` has ordered."""

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current

    def model_wrapped(self, module: nn.Module) -> None:
        """Begins to record with the first module.

        Raises:
            ValueError: the file of SMP_VERIFY contains no order; gradients cannot be recorded.
        """
        current = self._current
        path = current.rank.settings.verify
        if path is None:
            return
        refuse_without_gradients(current.rank, "a record of all gradients (smp verify)")
        if current.verification is None:
            current.verification = Recording(current, Order.read(path))
        assert isinstance(current.verification, Recording)
        current.verification.cast(module)

    def model_partitioned(self, model: Any) -> None:
        if isinstance(self._current.verification, Recording):
            self._current.verification.model_partitioned(model)


class Recording(Entering):
    """The recording of one rank, which also replays the inputs of others.

    Args:
        current: the runtime.
        order: order of the command.
    """

    def __init__(self, current: runtime.Runtime, order: Order) -> None:
        ranks, is_alone = current.rank.ranks, current.rank.world_size == 1
        self._is_split = current.rank.config.prescaled_batch and current.rank.sizes["tp"] > 1
        super().__init__(
            dtype=torch.float64 if order.is_exact else None,
            own_tensors=self._buffers,
            notes_draws=is_alone,
            keeps=ranks["pp"] == ranks["cp"] == 0 and (ranks["tp"] == 0 or not self._is_split),
        )
        self._current, self._order = current, order
        self._replay = None if order.replay is None else Path(order.replay)
        self._folder = Path(order.folder) / f"rank{current.rank.global_rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._recorder = ModuleRecorder(self._microbatch, notes_draws=is_alone)
        self._num_calls = self._num_updates = 0
        self._stages: list[tuple[str, int]] = []  # steps and updates in the order of time
        self._dtypes: set[str] = set()
        self._in_step = False
        self._write_facts()

    def _models(self) -> list[Any]:
        return [m for m in self._current.wrapped.models if getattr(m, "partitioned", False)]

    def _buffers(self) -> Iterator[Tensor]:
        models: list[Any] = self._current.wrapped.models
        return (buffer for model in models for buffer in model.buffers())

    def _microbatch(self) -> int | None:
        mb = _C.current_microbatch()
        return mb if self._in_step and mb >= 0 and not is_tracing() else None

    # ---- models

    def cast(self, module: nn.Module) -> None:
        """Casts a module before it is wrapped, while the whole model is here."""
        if self.dtype is not None:
            module.to(self.dtype)

    def model_partitioned(self, model: Any) -> None:
        """Records the initial values of a model, and its modules from now on."""
        prefix = "" if model._idx == 0 else f"{model._idx}:"
        modules = {prefix + name: module for name, module in model.local_named_modules()}
        self._recorder.watch(list(modules.values()), list(modules))
        parameters = list(model.get_module().named_parameters())
        self._dtypes |= {str(p.dtype) for _, p in parameters if p.is_floating_point()}
        translators = [
            registration.translators[0]
            for registration in model._engine.registrations
            if registration.translators is not None
        ]
        self._save(
            f"begin{model._idx}",
            {
                "prefix": prefix,
                "values": {model._idx: _detached(model._parts().marked_state())},
                "parameters": [name for name, _ in parameters],
                "translators": translators,
            },
        )
        self._write_facts()

    # ---- steps

    def calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the arguments of a step function, as (args, kwargs), per data-parallel rank.

        Outside a replay there is one entry, for this rank.
        """
        number = self._num_calls
        self._num_calls += 1
        self._in_step = True
        self.begin(number, self._replay)
        try:
            kept = KeptArguments((args, kwargs), self.dtype)
        except Exception as error:
            if self.dtype is not None or self._replay is not None:
                raise ValueError(
                    f"{_C.rank_prefix()}smp verify: the arguments of the step function cannot be "
                    f"kept for another process: {type(error).__name__}: {error}; pass tensors in "
                    "plain containers"
                ) from error
            self.notes.append(f"arguments of a step function cannot be kept: {error}")
            return [(args, kwargs)]
        if self._replay is None:
            self._keep_inputs("inputs", number, kept.data)
            return [(args, kwargs) if self.dtype is None else kept.restored()]
        files = sorted(self._replay.glob(f"inputs-*-{number}.pickle"))
        self._check_inputs(len(files))
        found = [kept.restored(path.read_bytes()) for path in files]
        if self.dtype is None:
            return found
        return [KeptArguments(call, self.dtype).restored() for call in found]

    def _check_inputs(self, count: int) -> None:
        if count == 0:
            raise ValueError(
                f"{_C.rank_prefix()}smp verify: the script calls a step function {self._num_calls} "
                "times in one process and less often in the other layout before its "
                "updates; make the number of calls independent of the layout"
            )
        models: list[Any] = self._current.wrapped.models
        if count > 1 and not all(model._engine.gradients.averages for model in models):
            raise ValueError(
                f"{_C.rank_prefix()}smp verify: average_grads_across_microbatches=False sums over "
                "microbatches and takes the mean over data-parallel ranks, which one process "
                "cannot replay; leave out layouts with dp, sdp or os"
            )

    def _keep_inputs(self, what: str, number: int, data: bytes) -> None:
        if not self.keeps:
            return
        idx = self._current.rank.ranks["rdp" if self._is_split else "dp"]
        (Path(self._order.folder) / f"{what}-{idx:04d}-{number}.pickle").write_bytes(data)

    def step_done(self, trains: bool, result: Any, counts: Sequence[int]) -> None:
        """Saves the records of a step function whose gradients are reduced.

        Args:
            trains: whether gradients were enabled.
            result: return value of the step function.
            counts: numbers of microbatches by data-parallel rank.
        """
        self._in_step = False
        if self._replay is None:
            self._keep_inputs("entering", self._num_calls - 1, self.take())
        self._add(
            "step",
            self._num_calls - 1,
            {
                "trains": trains,
                "counts": list(counts),
                "outputs": _outputs(result),
                "modules": self._recorder.take(),
                "gradients": {m._idx: self._gradients(m) for m in self._models() if trains},
            },
        )

    def _gradients(self, model: Any) -> dict[str, Any]:
        """Returns the gradients that this rank holds, with marks of their places."""
        named = list(model.local_named_parameters())
        grads = {name: master_of(p).grad for name, p in named if p.requires_grad}
        flat = {}
        for name, parameter in named:
            holding = holding_of(parameter)
            if holding is not None and self._current.rank.sizes["shard"] > 1:
                flat[name] = (holding.begin, holding.numel, tuple(holding.shape))
        marks = partial.marks_of(partial.slices_of(named), flat or None)
        found: dict[str, Any] = {n: grad for n, grad in grads.items() if grad is not None} | marks
        return {name: _detached(value) for name, value in found.items()}

    # ---- updates

    def updated(self, optimizer: Any) -> None:
        """Saves an optimizer's update. Collective where whole parameters are read.

        Raises:
            EndOfVerification: this was the last ordered update.
        """
        state = optimizer.local_state_dict(gather_if_shard=False)
        self._add(
            "update",
            self._num_updates,
            {
                "values": {m._idx: _detached(m._parts().marked_state()) for m in self._models()},
                "entries": _detached(state["state"] | {k: state[k] for k in MARKS & state.keys()}),
                "settings": [
                    {k: v for k, v in group.items() if isinstance(v, int | float | str | tuple)}
                    for group in state["param_groups"]
                ],
                "indices": optimizer.param_name_to_index(),
                "steps": self._num_calls,
            },
        )
        self._num_updates += 1
        if self._num_updates >= self._order.steps * len(self._current.wrapped.optimizers):
            raise EndOfVerification

    # ---- files

    def _add(self, what: str, number: int, content: dict[str, Any]) -> None:
        self._save(f"{what}{number}", content)
        self._stages.append((what, number))
        self._write_facts()

    def _save(self, name: str, content: dict[str, Any]) -> None:
        torch.save(content, self._folder / f"{name}.pt")

    def _write_facts(self) -> None:
        rank = self._current.rank
        facts = {
            "place": f"global_rank {rank.global_rank} ({rank.place})",
            "ranks": rank.ranks,
            "sizes": rank.sizes,
            "half": str(rank.config.half_dtype) if rank.config.half_dtype else None,
            "dtypes": sorted(self._dtypes),
            "stages": self._stages,
            "draws": [*self._recorder.draws, *self.draws],
            "taken": self.taken,
            "notes": self.notes,
        }
        (self._folder / "facts.json").write_text(json.dumps(facts))


def _detached(value: Any) -> Any:
    """Copies tensors to host memory, so that later writes do not change them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return value


def _outputs(result: Any) -> list[list[Any]]:
    """Returns the leaves of a step function's return value, each by microbatch."""
    found: list[list[Any]] = []

    def visit(value: Any) -> None:
        if hasattr(value, "outputs") and hasattr(value, "reduce_mean"):
            rows = [row_of(output) for output in value.outputs]
            found.append([None if row is None else row.numbers for row in rows])
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, tuple | list):
            if value and all(isinstance(x, bool | int | float | str) for x in value):
                found.append(list(value))
                return
            for item in value:
                visit(item)

    visit(result)
    return found
