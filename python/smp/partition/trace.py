"""Runs a model once, without memory or for real, to measure the cost of each module."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import smp._C as _C
from smp._device import device_module, forked_generators, is_accelerator
from smp.modules import packed
from smp.modules.module_writes import ModuleWrites
from smp.modules.tracing import tracing
from smp.partition import trace_flops
from smp.partition.costs import ModuleCost, Trace, TracedValue
from smp.partition.fake_leaks import nothing_kept
from smp.partition.own_collectives import OwnCollective
from smp.partition.state_watch import HookWatch, StateWatch, Use, around_uses
from smp.partition.trace_guard import exchange_tensors, untouched
from smp.partition.trace_meters import OwnMeter
from smp.partition.trace_recorder import Recorder, around_forwards
from smp.partition.trace_state import KeptValues, convert_by_exchange, dtypes_of
from smp.partition.trace_values import KnownValues
from smp.partition.tree import kind_of

_NUM_TIMED_RUNS = 3


class TraceError(RuntimeError):
    """A forward raised while it was traced; the text names the error and the module."""


def trace(
    root: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    fake: bool = True,
    measure_times: bool = False,
    measure_memory: bool = False,
    flops_per_byte: float | None = None,
) -> Trace:
    """Runs the forward of a model once and charges each operator to a module.

    Gradients are enabled, because the partition is for training; the mode of the modules is kept.
    Parameters, buffers, attributes of modules and random numbers are as before afterwards.

    Args:
        root: any module. Parameters may be real, on the meta device or placeholders.
        args, kwargs: arguments of the call, real tensors.
        device: device that the model runs on, or is to appear on.
        fake: whether to run without arithmetic and memory: tensors have only shapes, and values
            where small arguments and buffers determine them. Code that reads other values into
            Python fails.
        measure_times: whether to measure own forward times, as medians of a few runs. Not with
            ``fake``.
        measure_memory: whether to measure on CUDA what each module leaves allocated, instead of
            adding up what autograd saves. Not with ``fake``.
        flops_per_byte: FLOPs that take as long as moving one byte through memory; None for the
            usual number of the type of ``device``.

    Raises:
        TraceError: the forward raised.
    """
    options = _Options(fake, measure_times, measure_memory, flops_per_byte)
    with nothing_kept() if fake else contextlib.nullcontext():
        return _traced(root, args, kwargs, device, options)


@dataclass(frozen=True)
class _Options:
    fake: bool
    measure_times: bool
    measure_memory: bool
    flops_per_byte: float | None = None


def _traced(
    root: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    options: _Options,
) -> Trace:
    modules = tuple(root.modules())
    own = torch.device("cpu") if options.fake else device
    with (
        tracing(),
        untouched(modules, keep_values=not options.fake),
        forked_generators(own),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        per_byte = options.flops_per_byte
        if per_byte is None:
            per_byte = trace_flops.flops_per_byte(device.type)
        run = _Run(root, modules, args, kwargs, device, per_byte)
        try:
            if options.fake:
                return run.fake()
            values = KeptValues(modules)
            try:
                with values:
                    result = run.real()
                if options.measure_memory and is_accelerator(device):
                    result = run.with_measured_memory(result)
                return run.with_times(result) if options.measure_times else result
            finally:
                values.restore()
        except (TraceError, OwnCollective):
            raise
        except Exception as error:  # out of memory, mostly
            raise TraceError(_describe(error, root, None)) from error


class _Run:
    """A model and one call of it, inside of `untouched`."""

    def __init__(
        self,
        root: nn.Module,
        modules: tuple[nn.Module, ...],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device,
        flops_per_byte: float,
    ) -> None:
        self._flops_per_byte = flops_per_byte
        self._root = root
        self._modules = modules
        self._call = (tuple(args), dict(kwargs))
        self._device = device
        self._known: KnownValues | None = None  # in a trace without memory

    def fake(self) -> Trace:
        with quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            known = self._known = KnownValues()
            buffers = {id(b) for module in self._modules for b in module._buffers.values()}

            def empty(tensor: Tensor) -> Tensor:
                # Copies of the real tensors would be wrong: placeholders have strides of zero, and
                # tensors on the meta device have the wrong device.
                made = empty_like(tensor, self._device)
                if id(tensor) in buffers:
                    known.add(made, tensor)
                return made

            def argument(tensor: Tensor) -> Tensor:
                made = moved(mode.from_tensor(ordinary(tensor)), self._device)
                known.add(made, tensor)
                return made

            exchange_tensors(self._modules, empty)
            convert_by_exchange(self._modules)
            call = pytree.tree_map_only(Tensor, argument, self._call)
            return self._recorded(call, "fake")

    def real(self) -> Trace:
        exchange_tensors(self._modules, lambda t: _on_device(t, self._device))
        return self._recorded(self._fresh_call(), self._device.type)

    def _fresh_call(self) -> Any:
        """Returns a new copy of the arguments, because the model may write into them."""
        return pytree.tree_map_only(
            Tensor, lambda t: moved(ordinary(t), self._device, copy=True), self._call
        )

    def _recorded(self, call: Any, how: str) -> Trace:
        with untouched(self._modules, keep_values=how != "fake"):
            watch, dtypes = StateWatch(self._modules), dtypes_of(self._modules)
            hooks = HookWatch(lambda: recorder.running)
            recorder = self._recorder()
            with hooks, watch.watching():
                self._watched(call, recorder, watch)
            casts = tuple(
                (*place, dtype)
                for place, dtype in dtypes_of(self._modules).items()
                if dtypes.get(place, dtype) != dtype
            )
            num_calls = [cost.num_calls for cost in recorder.costs]
            if watch.compare():
                writes = self._writes(watch, call, how, hooks.found, num_calls)
            else:
                writes = ModuleWrites(mixed=frozenset(hooks.found))
        return self._trace_of(recorder, how, writes, casts)

    def _writes(
        self,
        first: StateWatch,
        call: Any,
        how: str,
        hooking: set[int],
        num_calls: Sequence[int],
    ) -> ModuleWrites:
        """Runs the model again to find what is written each time, and which modules' code uses it.

        Attributes that only the first forward writes are made once and kept.
        """
        uses: list[Use] = []
        recorder = self._recorder()

        def note(idx: int, name: str, writes: bool) -> None:
            uses.append(Use(recorder.running, idx, name, writes))

        again = StateWatch(self._modules)
        with around_uses(self._modules, first.written, note):
            try:
                self._watched(call if how == "fake" else self._fresh_call(), recorder, again)
            except TraceError:  # the forward cannot be repeated: each may be written and read
                uses += [Use(0, *key, True) for key in first.written]
        again.compare()
        writes = again.conclude(uses, hooking, num_calls)
        return replace(writes, replaced=frozenset(first.replaced | again.replaced))

    def _watched(self, call: Any, recorder: Recorder, watch: StateWatch) -> None:
        """Runs the model once."""
        recorder.add_inputs(call)
        args, kwargs = call

        def wrap(idx: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            return watch.wrap(recorder.wrap(idx, forward))

        try:
            with around_forwards(self._modules, wrap), recorder.watching():
                # The result stays where it was made.
                self._root(*args, **kwargs)
        except OwnCollective:
            raise
        except Exception as error:
            raise TraceError(_describe(error, self._root, recorder.failed_at)) from error

    def _recorder(self) -> Recorder:
        return Recorder(
            self._modules,
            [
                kind_of(module) != _C.NodeKind.INDIVISIBLE
                and (
                    any(True for _ in module.children())
                    or not any(True for _ in module.parameters(recurse=False))
                )
                for module in self._modules
            ],
            self._flops_per_byte,
            self._known,
        )

    def _trace_of(
        self,
        recorder: Recorder,
        how: str,
        writes: ModuleWrites,
        casts: tuple[tuple[int, str, torch.dtype], ...],
    ) -> Trace:
        return Trace(
            modules=self._modules,
            costs=tuple(ModuleCost(**vars(raw)) for raw in recorder.costs),
            order=tuple(recorder.order),
            values=tuple(
                TracedValue(**(vars(raw) | {"consumers": tuple(sorted(raw.consumers))}))
                for raw in recorder.values
            ),
            calls=frozenset(recorder.calls),
            parameter_reads=dict(recorder.parameter_reads),
            how=how,
            unit="flops",
            cost_per_link_byte=trace_flops.flops_per_link_byte(self._device.type),
            writes=writes,
            casts=casts,
        )

    def _own(self, now: Callable[[], float]) -> list[float]:
        """Returns by how much the own code of each module makes a number grow in a forward."""
        meter = OwnMeter(len(self._modules), now)
        args, kwargs = self._fresh_call()
        with untouched(self._modules, keep_values=True), around_forwards(self._modules, meter.wrap):
            self._root(*args, **kwargs)
        return meter.own

    def _now_ms(self) -> float:
        if is_accelerator(self._device):
            device_module(self._device).synchronize(self._device)
        return 1e3 * time.perf_counter()

    def with_times(self, traced: Trace) -> Trace:
        runs = [self._own(self._now_ms) for _ in range(1 + _NUM_TIMED_RUNS)]
        own_ms = [statistics.median(times) for times in zip(*runs[1:], strict=True)]
        costs = tuple(
            replace(cost, time_ms=ms) for cost, ms in zip(traced.costs, own_ms, strict=True)
        )
        total_flops = sum(cost.forward_flops for cost in costs)
        ms_per_flop = sum(own_ms) / total_flops if total_flops else 0.0
        return replace(
            traced,
            costs=costs,
            unit="ms",
            cost_per_link_byte=traced.cost_per_link_byte * ms_per_flop,
        )

    def with_measured_memory(self, traced: Trace) -> Trace:
        module = device_module(self._device)
        own_bytes = self._own(lambda: module.memory_allocated(self._device))
        costs = tuple(
            replace(cost, activation_bytes=int(num_bytes))
            for cost, num_bytes in zip(traced.costs, own_bytes, strict=True)
        )
        values = []
        for value in traced.values:
            before = traced.costs[value.producer].activation_bytes
            share = value.activation_bytes / before if before else 0.0
            measured = int(share * costs[value.producer].activation_bytes)
            values.append(replace(value, activation_bytes=measured))
        return replace(traced, costs=costs, values=tuple(values))


@contextmanager
def quiet() -> Iterator[None]:
    """Silences PyTorch's logs before it raises; the error is in our own warning."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def ordinary(tensor: Tensor) -> Tensor:
    """Returns a tensor that can be saved for backward: a copy of one made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def moved(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Returns a leaf with these values on ``device``."""
    moved = tensor.detach().to(device, copy=copy)
    return moved.requires_grad_(tensor.requires_grad)


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    if packed.is_packed(tensor):
        like: Tensor = packed.mapped(tensor, lambda _, part: empty_like(part, device))
        return like
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if packed.is_packed(tensor):
        parts_moved: Tensor = packed.mapped(tensor, lambda _, part: part.to(device))
        return parts_moved
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def _describe(error: Exception, root: nn.Module, idx: int | None) -> str:
    """Returns what went wrong, and in which module."""
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if idx is None:
        return text
    name, module = list(root.named_modules())[idx]
    return f"{text} in module {name or '(root)'} ({type(module).__name__})"
