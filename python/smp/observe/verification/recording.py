"""Records what a script computes on one rank, for `smp verify`.

Nothing here communicates: a rank writes what it holds, with the marks of state dicts of one rank,
and the command joins the parts. See docs/design/verify.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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
            ValueError: the file of SMP_VERIFY contains no order.
        """
        current = self._current
        path = current.rank.settings.verify
        if path is None:
            return
        if current.verification is None:
            current.verification = Recording(current, Order.read(path))
        assert isinstance(current.verification, Recording)
        current.verification.cast(module)

    def model_partitioned(self, model: Any) -> None:
        if isinstance(self._current.verification, Recording):
            self._current.verification.model_partitioned(model)


class Recording:
    """The recording of one rank.

    Args:
        current: the runtime.
        order: order of the command.
    """

    def __init__(self, current: runtime.Runtime, order: Order) -> None:
        self._current = current
        self._order = order
        self._dtype = None if order.dtype is None else getattr(torch, order.dtype)
        self._folder = Path(order.folder) / f"rank{current.rank.global_rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._recorder = ModuleRecorder(self._microbatch, current.rank.world_size == 1)
        self._num_calls = self._num_updates = 0
        self._notes: list[str] = []
        self._dtypes: set[str] = set()
        self._in_step = False
        self._is_split = current.rank.config.prescaled_batch and current.rank.sizes["tp"] > 1
        self._entering = Entering(self._dtype, self._buffers, current.rank.world_size == 1)
        self._entering.keeps = self._has_batch
        self._write_facts()

    # ---- models

    def cast(self, module: nn.Module) -> None:
        """Casts a module before it is wrapped, while the whole model is here."""
        if self._dtype is not None:
            module.to(self._dtype)

    def model_partitioned(self, model: Any) -> None:
        """Records the initial values of a model, and its modules from now on."""
        prefix = _prefix(model)
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
        replay = self._order.replay
        self._entering.begin(number, None if replay is None else Path(replay))
        try:
            kept = KeptArguments((args, kwargs), self._dtype)
        except Exception as error:
            if self._dtype is not None or self._order.replay is not None:
                raise ValueError(
                    f"{_C.rank_prefix()}smp verify: the arguments of the step function cannot be "
                    f"kept for another process: {type(error).__name__}: {error}; pass tensors in "
                    "plain containers"
                ) from error
            self._notes.append(f"arguments of a step function cannot be kept: {error}")
            return [(args, kwargs)]
        if self._order.replay is None:
            self._keep_inputs("inputs", number, kept.data)
            return [(args, kwargs) if self._dtype is None else kept.restored()]
        files = sorted(Path(self._order.replay).glob(f"inputs-*-{number}.pickle"))
        if not files:
            raise ValueError(
                f"{_C.rank_prefix()}smp verify: the script calls a step function {number + 1} "
                "times in one process and less often in the other layout before its "
                "updates; make the number of calls independent of the layout"
            )
        if len(files) > 1:
            self._refuse_sums()
        found = [kept.restored(path.read_bytes()) for path in files]
        if self._dtype is None:
            return found
        return [KeptArguments(call, self._dtype).restored() for call in found]

    def _refuse_sums(self) -> None:
        models: list[Any] = self._current.wrapped.models
        if not all(model._engine.gradients.averages for model in models):
            raise ValueError(
                f"{_C.rank_prefix()}smp verify: average_grads_across_microbatches=False sums over "
                "microbatches and takes the mean over data-parallel ranks, which one process "
                "cannot replay; leave out layouts with dp, sdp or os"
            )

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the step function to record data that are no arguments, and random numbers."""
        return self._entering.around(function)

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs and records a call of a model."""
        return self._entering.call(forward, args, kwargs)

    def backward(self) -> AbstractContextManager[None]:
        """Returns a context for a backward of a model."""
        return self._entering.backward()

    def _buffers(self) -> Iterator[Tensor]:
        models: list[Any] = self._current.wrapped.models
        for model in models:
            yield from model.buffers()

    def _microbatch(self) -> int | None:
        mb = _C.current_microbatch()
        return mb if self._in_step and mb >= 0 and not is_tracing() else None

    @property
    def _has_batch(self) -> bool:
        """Returns whether the batch of this rank is recorded."""
        ranks = self._current.rank.ranks
        return ranks["pp"] == 0 and (ranks["tp"] == 0 or not self._is_split)

    def _keep_inputs(self, what: str, number: int, data: bytes) -> None:
        if not self._has_batch:
            return
        idx = self._current.rank.ranks["rdp" if self._is_split else "dp"]
        path = Path(self._order.folder) / f"{what}-{idx:04d}-{number}.pickle"
        path.write_bytes(data)
        path.with_suffix(".digest").write_text(hashlib.sha256(data).hexdigest())

    def step_done(self, trains: bool, result: Any, counts: Sequence[int]) -> None:
        """Saves the records of a step function whose gradients are reduced.

        Args:
            trains: whether gradients were enabled.
            result: return value of the step function.
            counts: numbers of microbatches by data-parallel rank.
        """
        self._in_step = False
        if self._order.replay is None:
            self._keep_inputs("entering", self._num_calls - 1, self._entering.take())
        self._save(
            f"step{self._num_calls - 1}",
            {
                "trains": trains,
                "counts": list(counts),
                "outputs": _outputs(result),
                "modules": self._recorder.take(),
                "gradients": self._gradients() if trains else {},
                "updates": self._num_updates,
            },
        )
        self._write_facts()

    def _gradients(self) -> dict[int, dict[str, Any]]:
        found = {}
        for model in self._current.wrapped.models:
            if not getattr(model, "partitioned", False):
                continue
            named = list(model.local_named_parameters())  # type: ignore[attr-defined]
            values = {name: master_of(p).grad for name, p in named if p.requires_grad}
            flat = {}
            for name, parameter in named:
                holding = holding_of(parameter)
                if holding is not None and self._current.rank.sizes["shard"] > 1:
                    flat[name] = (holding.begin, holding.numel, tuple(holding.shape))
            marks = partial.marks_of(partial.slices_of(named), flat or None)
            present = {name: _copy(grad) for name, grad in values.items() if grad is not None}
            found[model._idx] = {**present, **marks}
        return found

    # ---- updates

    def updated(self, optimizer: Any) -> None:
        """Saves an optimizer's update. Collective where whole parameters are read.

        Raises:
            EndOfVerification: this was the last ordered update.
        """
        current = self._current
        number = current.wrapped.optimizers.index(optimizer)
        models = [m for m in current.wrapped.models if getattr(m, "partitioned", False)]
        values = {m._idx: _detached(m._parts().marked_state()) for m in models}  # type: ignore[attr-defined]
        state = optimizer.local_state_dict(gather_if_shard=False)
        self._save(
            f"update{self._num_updates}",
            {
                "values": values,
                "optimizer": number,
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
        self._write_facts()
        if self._num_updates >= self._order.steps * len(current.wrapped.optimizers):
            raise EndOfVerification

    # ---- files

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
            "num_steps": self._num_calls,
            "num_updates": self._num_updates,
            "draws": [*self._recorder.draws, *self._entering.draws],
            "taken": self._entering.taken,
            "notes": [*self._notes, *self._entering.notes],
        }
        (self._folder / "facts.json").write_text(json.dumps(facts))


def _prefix(model: Any) -> str:
    return "" if model._idx == 0 else f"{model._idx}:"


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _detached(value: Any) -> Any:
    """Copies tensors to host memory, so that later writes do not change them."""
    if isinstance(value, Tensor):
        return _copy(value)
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
