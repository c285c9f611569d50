"""Charges every operator of a forward to the module whose own code runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smp._torch_releases import operators
from smp.modules.operators import memory_of, written_tensors
from smp.modules.transforms import is_transformed, unwrapped
from smp.partition import trace_flops
from smp.partition.costs import DIFFERENTIATES, OWN_BACKWARD, READS, TRANSFORMS
from smp.partition.own_collectives import refuse_collective
from smp.partition.trace_nodes import NodeBackwards
from smp.partition.trace_values import KnownValues

Forward = Callable[..., Any]

_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    groups = () if offs is None or a.dim() + b.dim() == 5 else offs.shape
    if a.dim() == b.dim() == 3:
        groups = a.shape[:1]
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype)


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    # The longest packed target is not known; it is no longer than all together.
    num_states = 2 * (targets.shape[-1] if targets.dim() else 0) + 1
    steps, batch = log_probs.shape[0], log_probs.shape[1:-1]
    return log_probs.new_empty(batch), log_probs.new_empty(*batch, steps, num_states)


# PyTorch's own shape functions for these refuse dtypes that the operators take, or read values.
_SHAPES_ONLY: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    **{packet.default: _grouped_mm for packet in operators("_grouped_mm")},
}


@dataclass
class RawCost:
    """The work of the own code of one module, over all its calls."""

    num_calls: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    activation_bytes: int = 0
    data_dependent: bool = False


@dataclass
class RawValue:
    """A tensor made by one module; modules are indices."""

    producer: int
    num_bytes: int
    consumers: set[int] = field(default_factory=set)
    needs_grad: bool = False
    sources: tuple[int, ...] = ()
    flops: float = 0.0
    activation_bytes: int = 0


def _tensors(value: Any) -> list[Tensor]:
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return [unwrapped(tensor) for tensor in leaves]


@contextmanager
def around_forwards(
    modules: Sequence[nn.Module], wrap: Callable[[int, Forward], Forward]
) -> Iterator[None]:
    """Replaces ``forward`` of each module on the instance; for use inside of `untouched`.

    A remote module's stub is put in the same place, so hooks of a module belong to its caller here
    as well.
    """
    for idx, module in enumerate(modules):
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["forward"] = wrap(idx, module.forward)
    yield


class _Functions(TorchFunctionMode):
    """A mode that reports functions which the recorder cannot judge by their operators alone:
    losses, and tensors made of tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor) and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])
        if func in (torch.isfinite, Tensor.isfinite) and isinstance(args[0], FakeTensor):
            # The operators of isfinite compare with themselves, which does not show the purpose.
            return ~(torch.isnan(args[0]) | torch.isinf(args[0]))
        if func not in trace_flops.LOSSES:
            return func(*self._recorder.with_numbers(func, args), **kwargs)
        with self._recorder.at_home_of(args[0] if args else kwargs["input"]):
            return func(*args, **kwargs)


class Recorder(TorchDispatchMode):
    """Records one forward of a model.

    Args:
        modules: distinct modules, the root first.
        may_split: whether own code of a module may run apart from its children, per module.
        flops_per_byte: FLOPs that the device does in the time of moving one byte.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        may_split: Sequence[bool],
        flops_per_byte: float,
        known: KnownValues | None = None,
    ) -> None:
        super().__init__()
        self.costs = [RawCost() for _ in modules]
        self.values: list[RawValue] = []
        self.order: list[int] = []
        self.calls: set[tuple[int, int]] = set()
        self.parameter_reads: dict[tuple[int, int], str] = {}
        self.failed_at: int | None = None
        self._may_split = may_split
        self._flops_per_byte = flops_per_byte
        self._known = known
        self._stack: list[int] = []
        self._own_backwards = 0  # number of the user's autograd functions whose forward runs now
        self._arguments: list[Any] = []
        self._value_of: dict[StorageWeakRef, int] = {}
        self._saved: set[StorageWeakRef] = set()
        self._saved_since: dict[StorageWeakRef, int] = {}  # bytes saved since the last operator
        self._holders: dict[StorageWeakRef, set[int]] = {}
        self._buffers: set[StorageWeakRef] = set()
        self._nodes = NodeBackwards()
        self._home: int | None = None  # the value where a loss is computed
        for idx, module in enumerate(modules):
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(memory_of(parameter), set()).add(idx)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._buffers.add(memory_of(buffer))

    # ---- calls

    @property
    def running(self) -> int:
        """Returns the module whose code runs now."""
        return self._stack[-1] if self._stack else 0

    def wrap(self, idx: int, forward: Forward) -> Forward:
        """Returns ``forward`` of module ``idx`` with its calls noted."""

        @functools.wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if self._stack:
                self.calls.add((self._stack[-1], idx))
                if is_transformed((args, kwargs)):
                    self.parameter_reads[self._stack[-1], idx] = TRANSFORMS
                elif self._own_backwards:
                    self.parameter_reads[self._stack[-1], idx] = OWN_BACKWARD
            cost = self.costs[idx]
            if cost.num_calls == 0:
                self.order.append(idx)
            cost.num_calls += 1
            self._stack.append(idx)
            self._arguments.append((args, kwargs))
            try:
                result = forward(*args, **kwargs)
            except BaseException:
                if self.failed_at is None:
                    self.failed_at = idx
                raise
            finally:
                self._stack.pop()
                self._arguments.pop()
            self._charge_nodes(_tensors(result))
            return result

        return traced

    def add_inputs(self, arguments: Any) -> None:
        """Adds tensors that the caller of the model has; they count as made by the root."""
        for tensor in _tensors(arguments):
            self._new_value(0, tensor)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records operators and what autograd saves."""
        with (
            torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda saved: saved),
            self._noting_own_backwards(),
            _Functions(self),
            self,
        ):
            yield

    @contextmanager
    def _noting_own_backwards(self) -> Iterator[None]:
        """Notes modules that the forward of a ``torch.autograd.Function`` of the user calls.

        The backward of the function uses these modules again, so they must be where its code is.
        """
        Function = torch.autograd.Function  # noqa: N806
        apply = Function.__dict__["apply"]

        def noting(cls: type, *args: Any, **kwargs: Any) -> Any:
            is_own = not cls.__module__.startswith(("torch.", "smp."))
            self._own_backwards += is_own
            try:
                return apply.__func__(cls, *args, **kwargs)
            finally:
                self._own_backwards -= is_own

        Function.apply = classmethod(noting)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Function.apply = apply  # type: ignore[method-assign]

    def with_numbers(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Returns arguments with known numbers, for functions that read numbers from tensors."""
        if self._known is None or func not in (torch.tensor, torch.as_tensor):
            return args
        return self._known.numbers(args)

    @contextmanager
    def at_home_of(self, value: Any) -> Iterator[None]:
        """Leaves the operators inside to the rank that has a tensor, if the caller has not.

        Args:
            value: the tensor, or a value that contains it.
        """
        found = _tensors(value) if self._stack else []
        value_idx = self._value_of.get(memory_of(found[0])) if found else None
        if value_idx is not None and not self._is_of_the_caller(value_idx):
            self._home = value_idx
        try:
            yield
        finally:
            self._home = None

    def _on_save(self, tensor: Tensor) -> Tensor:
        key = memory_of(tensor)
        if self._stack and key not in self._saved and not self._belongs_to_model(key):
            self._saved.add(key)
            num_bytes = tensor.untyped_storage().nbytes()
            self.costs[self._stack[-1]].activation_bytes += num_bytes
            value = self._made_away(key)
            if value is not None:
                value.activation_bytes += num_bytes
            else:
                self._saved_since[key] = num_bytes
        # The tensor itself would hold its own graph in a cycle.
        return tensor.detach()

    def _made_away(self, key: StorageWeakRef) -> RawValue | None:
        """Returns the value if the running code made it on the rank with the data, else None."""
        value_idx = self._value_of.get(key)
        if value_idx is None:
            return None
        value = self.values[value_idx]
        return value if value.sources and value.producer == self._stack[-1] else None

    def _belongs_to_model(self, key: StorageWeakRef) -> bool:
        return key in self._holders or key in self._buffers

    # ---- operators

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        refuse_collective(func, args, kwargs)
        if not self._stack or trace_flops.is_ignored(func):
            return self._run(func, args, kwargs)
        if _DATA_DEPENDENT.intersection(func.tags):
            self.costs[self._stack[-1]].data_dependent = True
        out = self._run(func, args, kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        cost = self.costs[self._stack[-1]]
        self._charge_nodes(inputs)
        needs_grad = self._nodes.needs_grad(inputs)
        forward, backward = trace_flops.operator_cost(
            func, args, kwargs, out, inputs, outputs, needs_grad, self._flops_per_byte
        )
        cost.forward_flops += forward
        if torch.is_grad_enabled():
            cost.backward_flops += backward
        elif needs_grad:
            made = [*outputs, *written_tensors(func, args, kwargs)]
            self._nodes.ran(self._stack[-1], inputs, made, backward)
            backward = 0.0
        left = self._follow(func, args, kwargs, inputs, outputs)
        if left is not None:
            left.flops = forward + backward
            left.activation_bytes = sum(
                self._saved_since.get(key, 0) for key in {memory_of(t) for t in inputs}
            )
        self._saved_since.clear()
        return out

    def _charge_nodes(self, tensors: Sequence[Tensor]) -> None:
        """Charges backwards of nodes that have made these tensors."""
        for idx, backward in self._nodes.seen(tensors):
            self.costs[idx].backward_flops += backward

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes_only = _SHAPES_ONLY.get(func)
        if shapes_only is not None and isinstance(args[0], FakeTensor):
            return shapes_only(*args, **kwargs)
        if self._known is not None:
            return self._known.run(func, args, kwargs)
        return func(*args, **kwargs)

    def _follow(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> RawValue | None:
        """Notes which modules made what is read here, and what is made here.

        Returns:
            the first value that is left to the rank that has the data.
        """
        idx = self._stack[-1]
        read: dict[int, Tensor] = {}
        known: set[StorageWeakRef] = set()
        for tensor in inputs:
            key = memory_of(tensor)
            known.add(key)
            if key in self._holders:
                self._read_parameter(idx, key, tensor)
            value_idx = self._value_of.get(key)
            if value_idx is not None:
                read[value_idx] = tensor
        rule = trace_flops.rule_of(func, args, inputs)
        sources = self._sources(rule, inputs)
        for value_idx, tensor in read.items():
            if sources or rule is trace_flops.Rule.VIEW:
                self.values[value_idx].needs_grad |= tensor.requires_grad
            else:
                self._read(value_idx, idx, tensor)
        num_before = len(self.values)
        for tensor in outputs:
            if memory_of(tensor) not in known:
                self._new_value(idx, tensor, sources)
        for tensor in written_tensors(func, args, kwargs):
            before = self._value_of.get(memory_of(tensor))
            if sources or (before is not None and not self._is_made_here(before)):
                self._new_value(idx, tensor, sources)
        return self.values[num_before] if sources and len(self.values) > num_before else None

    def _sources(self, rule: trace_flops.Rule, inputs: list[Tensor]) -> tuple[int, ...]:
        """Returns the values that the result is made of where the data are; empty if made here."""
        # In a module that is always whole it makes no difference where it is made.
        if not self._may_split[self._stack[-1]]:
            return ()
        values = [self._value_of.get(memory_of(tensor)) for tensor in inputs]
        if self._home is not None:
            others = {v for v in values if v is not None and v != self._home}
            return (*sorted(others), self._home)
        if rule is trace_flops.Rule.FIRST:
            if values[0] is None or self._is_of_the_caller(values[0]):
                return ()
            others = {v for v in values if v is not None and v != values[0]}
            return (*sorted(others), values[0])
        if rule is not trace_flops.Rule.ALL:
            return ()
        known = {v for v in values if v is not None and not self._is_of_the_caller(v)}
        return tuple(sorted(known)) if None not in values and known == set(values) else ()

    def _is_of_the_caller(self, value_idx: int) -> bool:
        """Returns whether the running code, or code that called it, made a value by operators.

        If the running code is that of a split module, so are all modules above it, and such a
        value is on their rank.
        """
        value = self.values[value_idx]
        return not value.sources and value.producer in self._stack

    def _is_made_here(self, value_idx: int) -> bool:
        value = self.values[value_idx]
        return not value.sources and value.producer == self._stack[-1]

    def _new_value(self, producer: int, tensor: Tensor, sources: tuple[int, ...] = ()) -> None:
        key = memory_of(tensor)
        if self._belongs_to_model(key):
            return
        self._value_of[key] = len(self.values)
        self.values.append(RawValue(producer, trace_flops.num_bytes(tensor), sources=sources))

    def _read(self, value_idx: int, consumer: int, tensor: Tensor) -> None:
        value = self.values[value_idx]
        value.needs_grad |= tensor.requires_grad
        value.consumers.add(consumer)

    def _read_parameter(self, idx: int, key: StorageWeakRef, tensor: Tensor) -> None:
        """Notes that own code of a module reads a parameter that another module holds."""
        holders = self._holders[key]
        if idx in holders:
            return
        holder = min(holders)
        if any(memory_of(t) == key for t in _tensors(self._arguments[-1])):
            # The parameter came as an argument, which it would from another rank, too.
            value_idx = self._value_of.setdefault(key, len(self.values))
            if value_idx == len(self.values):
                self.values.append(RawValue(holder, trace_flops.num_bytes(tensor)))
            idx = self._taker_of(key)
            if idx in holders:
                return
        is_backward = torch._C._current_autograd_node() is not None
        self.parameter_reads.setdefault((idx, holder), DIFFERENTIATES if is_backward else READS)

    def _taker_of(self, key: StorageWeakRef) -> int:
        """Returns the module whose code took a parameter from its holder and passed it on.

        If the holder were on another rank, this code would take a placeholder.
        """
        for idx, arguments in zip(reversed(self._stack), reversed(self._arguments), strict=True):
            if all(memory_of(t) != key for t in _tensors(arguments)):
                return idx
        return self._stack[0]  # an argument of the model: the caller of the root took it
