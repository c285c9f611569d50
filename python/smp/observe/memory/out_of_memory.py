"""Explains out-of-memory errors: what the rank held, and what the partition expected."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp.observe.memory.failure import Failure, Failures, is_out_of_memory
from smp.observe.memory.holdings import Held, held_by
from smp.partition.expected_memory import Expected
from smp.world import runtime
from smp.world.observers import StepObserver

_REMEDY = (
    "smp estimate computes what ranks hold with other settings, docs/memory.md lists what helps"
)


class OutOfMemory(torch.OutOfMemoryError):
    """A `torch.OutOfMemoryError`, also on the CPU, whose text lists what the rank held."""


class MemoryObserver(StepObserver):
    """Replaces an allocator's errors by errors that list what was held. Not collective."""

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
        lines.append(_REMEDY)
    else:
        lines.append(
            "no model is partitioned yet: each rank builds all of it; build it on the meta device, "
            "or with smp.model_creation and delayed_parameter_initialization"
        )
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Returns a number of bytes with its unit, such as ``"1.5 GiB"``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


# ---- what was held


def _rest(held: Held, failure: Failure) -> int:
    """Returns bytes of activations in flight, buffers of gradients, and what was being made."""
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
    if not expected:
        return [
            "the partition expected nothing: models are traced with several pipeline ranks only"
        ]
    return [
        f"the partition expected at most {size(one.peak)}: parameters of {size(one.parameters)}, "
        f"{one.in_flight} microbatches in flight of {size(one.activations)} each"
        for one in expected
    ]
