"""The error of a rank that has no memory left: what it held, and what would have made it fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp.observe.memory.advice import Need, Situation, best_setting, settings_that_fit
from smp.observe.memory.failure import Failure, Failures, is_out_of_memory
from smp.observe.memory.holdings import Held, held_by
from smp.partition.expected import Expected
from smp.world import runtime
from smp.world.observers import StepObserver

# Tensors of state for a parameter in the optimizers of PyTorch; others are taken for Adam.
_STATES = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2, "Rprop": 2, "Lion": 1}


class OutOfMemory(torch.OutOfMemoryError):
    """`torch.OutOfMemoryError`, also on the CPU, that says what was held and what to change."""


class MemoryObserver(StepObserver):
    """Makes errors of an allocator say what was held. Not collective."""

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current
        self._failures: Failures | None = None  # made when the device is set up

    def model_wrapped(self, module: nn.Module) -> None:
        self._noted()

    def failed(self, doing: str, error: BaseException) -> None:
        """Raises `OutOfMemory` in place of an allocator's error."""
        if isinstance(error, OutOfMemory) or not isinstance(error, RuntimeError):
            return
        if is_out_of_memory(error):
            failure = self._noted().failure(error)
            raise OutOfMemory(_describe(self._current, doing, error, failure)) from error

    def _noted(self) -> Failures:
        if self._failures is None:
            self._failures = Failures(self._current.rank.device)
        return self._failures


def _describe(current: runtime.Runtime, doing: str, error: RuntimeError, failure: Failure) -> str:
    """Returns the text of the error."""
    models = [model for model in current.wrapped.models if getattr(model, "partitioned", False)]
    held = held_by(models, current.wrapped.optimizers, current.rank.device, failure.counted_from)
    first = str(error).strip().splitlines()[0] if str(error).strip() else "no memory"
    asked = size(failure.asked) if failure.asked else "more"
    lines = [
        f"{_C.rank_prefix()}out of memory in {doing}: {asked} was asked for, "
        f"{size(failure.in_use)} was in use ({first})"
    ]
    lines += _held_lines(current, held, failure)
    expected = [e for e in (_expected_of(model) for model in models) if e is not None]
    lines += _expected_lines(expected)
    if models:
        lines += _advice_lines(_situation(current, models, held, failure, expected))
    else:
        lines.append(
            "no model is partitioned yet: each rank builds all of it; build it on the meta device, "
            "or with smp.model_creation and delayed_parameter_initialization"
        )
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


# ---- what was held


def _rest(held: Held, failure: Failure) -> int:
    """Activations of microbatches in flight, buffers of gradients, and what was being made."""
    counted = held.large_bytes if failure.counted_from else held.total
    return max(0, failure.in_use - counted)


def _held_lines(current: runtime.Runtime, held: Held, failure: Failure) -> list[str]:
    lines = ["this rank held:"]
    lines += [f"  {kind}: {size(num_bytes)}" for kind, num_bytes in held.by_kind.items()]
    in_flight = (
        "" if current.server is None else f", {int(current.server.stats()['records'])} calls"
    )
    small = f" (tensors of {size(failure.counted_from)} and more)" if failure.counted_from else ""
    lines.append(
        f"  activations in flight and what a step makes{in_flight}: "
        f"{size(_rest(held, failure))}{small}"
    )
    lines.append(f"  free in the allocator, reserved for later tensors: {size(failure.cached)}")
    modules = held.largest_modules()
    if modules:
        lines.append("the largest modules:")
    for name, kinds in modules:
        parts = ", ".join(f"{kind} {size(n)}" for kind, n in kinds.items() if n)
        lines.append(f"  {name}: {parts}")
    return lines


# ---- what was expected


def _expected_of(model: Any) -> Expected | None:
    found: Expected | None = model._expected_memory
    return found


def _expected_lines(expected: list[Expected]) -> list[str]:
    if not expected or not any(one.activations for one in expected):
        return [
            "the partition expected nothing: models are traced with several pipeline ranks only"
        ]
    return [
        f"the partition expected at most {size(one.peak)}: parameters of {size(one.parameters)}, "
        f"{one.in_flight} microbatches in flight of {size(one.activations)} each"
        for one in expected
    ]


# ---- what would have fitted


def _situation(
    current: runtime.Runtime,
    models: list[Any],
    held: Held,
    failure: Failure,
    expected: list[Expected],
) -> Situation:
    rank, kinds = current.rank, held.by_kind
    trainable = [
        p for model in models for _, p in model.local_named_parameters() if p.requires_grad
    ]
    whole = sum(p.numel() * p.element_size() for p in trainable)
    sharded = rank.config.sharded_data_parallel_degree
    parameters = kinds["parameters"]
    gradients = max(kinds["gradients"], whole // max(1, sharded))
    per_parameter = max(
        (_state_per_parameter(o.optimizer) for o in current.wrapped.optimizers), default=2.0
    )
    state = kinds["optimizer state"]
    if not held.has_state:
        state += int(per_parameter * whole / rank.shard_size)
    traced = sum(e.activations * e.in_flight for e in expected)
    activations = max(_rest(held, failure) + failure.asked, traced)
    in_flight = max((e.in_flight for e in expected if e.activations), default=1)
    config, pp = rank.config, rank.sizes["pp"]
    blocks = [num_bytes for e in expected for num_bytes in e.block_bytes]
    known = [e for e in expected if e.checkpointed and e.activations]
    return Situation(
        need=Need(parameters, gradients, state, activations, kinds["gathered units"]),
        room_bytes=failure.in_use,
        pp=pp,
        rdp=rank.sizes["rdp"],
        shard_size=rank.shard_size,
        shards_parameters=sharded > 1,
        microbatches=config.microbatches,
        in_flight=in_flight,
        most_in_flight=max(in_flight, config.active_microbatches or pp),
        samples=max(1, current.steps.samples // max(1, config.microbatches)),
        checkpointed_bytes=sum(e.checkpointed for e in known) if known else None,
        num_blocks=len(blocks),
        largest_unit_bytes=max(blocks, default=0),
        is_fp32=config.half_dtype is None and all(p.dtype == torch.float32 for p in trainable),
        optimizer_per_parameter=per_parameter,
    )


def _state_per_parameter(optimizer: torch.optim.Optimizer) -> float:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    kind = type(optimizer).__name__
    if kind == "SGD":
        return 1.0 if group.get("momentum") else 0.0
    return float(_STATES.get(kind, 2) + bool(group.get("amsgrad")))


def _advice_lines(situation: Situation) -> list[str]:
    needs, room = situation.need.total, situation.room_bytes
    head = f"a step needs {size(needs)} of this rank, and {size(room)} is known to fit"
    found = settings_that_fit(situation)
    if found:
        return [f"{head}; with one of these it would have:"] + [
            f"  {one.words}: {size(one.needs_bytes)}" for one in found
        ]
    best = best_setting(situation)
    if best is None:
        return [f"{head}; no setting changes that, so it takes more memory or more ranks"]
    return [
        f"{head}; no setting, and no two, are enough: {best.words} alone leaves "
        f"{size(best.needs_bytes)}; more ranks or more memory have to do the rest"
    ]
