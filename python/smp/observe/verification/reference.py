"""Runs the whole model in one process, in addition to the pipeline, without lasting effects."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import smp._C as _C
from smp._device import device_module, is_accelerator
from smp.dropout import places
from smp.dropout.others import others_kept, state_of_others
from smp.modules import autocast
from smp.modules.forwards import uncover
from smp.modules.tracing import running_again
from smp.observe.verification.outputs import Inconclusive, are_independent, runs_own_backward
from smp.observe.verification.recorder import ModuleRecorder, leaves_of
from smp.partition.trace import moved, ordinary
from smp.partition.trace_guard import untouched
from smp.partition.trace_state import KeptValues
from smp.pipeline.module_state import apart
from smp.pipeline.remote_tensor import RemoteTensor

# Arguments of these types cannot be changed by the code that gets them.
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, slice, type)


class _Operators(TorchDispatchMode):
    """Sees every operator of a run.

    A collective of the model's own would hang, because other ranks do not run it at this time. And
    a value that a module rounds to a coarser dtype (norms of models in float64 that compute in
    float32) is only as exact as that dtype from there on: its digits depend on the order of sums,
    which changes with the strides of a tensor from another rank.

    Args:
        rounded: set that gets the dtypes to which floating-point tensors were rounded.
    """

    def __init__(self, rounded: set[torch.dtype]) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise Inconclusive(f"the model communicates by itself ({func})")
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _is_coarser(result.dtype, args[0].dtype):
            self._rounded.add(result.dtype)
        return result


@dataclass
class ReferenceCall:
    """A call of the model.

    Attributes:
        arguments: copies of the arguments; each run gets copies of these.
        casts: state of autocast.
        grad: whether gradients were enabled.
        leaves: leaves of the output.
    """

    arguments: Any
    casts: autocast.AutocastState
    grad: bool
    leaves: list[Any] = field(default_factory=list)


class Reference:
    """Runs a model that is spread over ranks as a whole in this process.

    Parameters of other ranks get their values back for the time of a run, as data of the same
    parameter objects, so that it does not matter how the model reaches them.

    Args:
        root: the user's model.
        modules: all of its modules, by name.
        kept: values of the parameters that are placeholders here.
        device: device of this process.
        moved: whether it computes with other last digits of all parameters.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Mapping[str, nn.Module],
        kept: Mapping[nn.Parameter, Tensor],
        device: torch.device,
        moved: bool = False,
    ) -> None:
        self._root = root
        self._names, self._modules = tuple(modules), tuple(modules.values())
        self._kept = kept
        self._device = device
        self._moved = moved
        self._first: _State | None = None  # state before the first call
        self._now: _State = {}
        self._left: _State = {}  # state that the last call has changed
        self._leaves_contents = False  # whether a call has changed containers
        self.calls: list[ReferenceCall] = []
        self.recorder = ModuleRecorder(lambda: 0)
        #: dtypes to which the model rounded values
        self.rounded: set[torch.dtype] = set()
        #: whether no output with an incoming gradient is computed from another such output
        self.is_certain = True

    def run(self, arguments: Any) -> ReferenceCall:
        """Runs the forward of one call, with its graph.

        Args:
            arguments: (args, kwargs) of the call.

        Raises:
            Inconclusive: the call draws random numbers, or cannot be repeated.
            Exception: any exception of the model.
        """
        call = ReferenceCall(
            _copy_arguments(arguments), autocast.capture(self._device), torch.is_grad_enabled()
        )
        if self._leaves_contents:
            raise Inconclusive("the model collects something from call to call")
        if self._first is None or self.calls:
            # This call sees what the last one changed, and what other code has set since.
            self._now = _state_of(self._modules) | self._left
            self._first = self._first or self._now
        with self._whole(records=True), _generators_kept(self._device):
            args, kwargs = _copy_arguments(call.arguments)
            before = random_state(self._device)
            with places.at(None):  # masks that are equal in all layouts do not use the generators
                output = self._root(*args, **kwargs)
            if random_state(self._device) != before:
                raise Inconclusive("the model draws random numbers, which layouts draw differently")
        call.leaves = leaves_of(output)
        if any(isinstance(leaf, RemoteTensor) for leaf in call.leaves):
            raise Inconclusive("the model keeps tensors of other ranks in its attributes")
        self.calls.append(call)
        return call

    def again(self, moved: bool = False) -> Reference:
        """Returns a second run of all calls so far, in the state at that time."""
        modules = dict(zip(self._names, self._modules, strict=True))
        other = Reference(self._root, modules, self._kept, self._device, moved)
        other._first, other._now = self._first, self._first or {}
        for call in self.calls:
            with (
                autocast.restore(call.casts, self._device),
                torch.set_grad_enabled(call.grad),
            ):
                other.run(call.arguments)
        return other

    def gradients(
        self, grads: Mapping[tuple[int, int], Tensor]
    ) -> dict[nn.Parameter, Tensor | None]:
        """Returns the gradients of all parameters.

        Args:
            grads: gradients that flow into an output from outside the model, by number of the call
                and of its leaf. A leaf that others are computed from gets this gradient alone, not
                the gradients that flow back from these others.

        Raises:
            Inconclusive: as in `run`.
            Exception: as in `run`.
        """
        parameters = [p for p in self._root.parameters() if p.requires_grad]
        roots, root_grads, handles, edges = [], [], [], []
        for (call, position), grad in grads.items():
            leaf = self.calls[call].leaves[position]
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                continue
            if leaf.grad_fn is None:
                raise Inconclusive("the model returns a parameter or an argument")
            grad = grad.to(device=leaf.device, dtype=leaf.dtype)
            roots.append(leaf)
            edges.append((leaf.grad_fn, leaf.output_nr))
            root_grads.append(grad)
            handles.append(leaf.register_hook(lambda _, given=grad: given))
        self.is_certain = are_independent(edges)
        if not roots or not parameters:
            return dict.fromkeys(parameters)
        try:
            with self._whole(records=False), _without_hooks(parameters):
                found = torch.autograd.grad(
                    roots, parameters, root_grads, retain_graph=False, allow_unused=True
                )
        finally:
            for handle in handles:
                handle.remove()
        if any(grad is None for grad in found) and runs_own_backward(edges):
            raise Inconclusive(
                "a function of the model in Python, such as a checkpoint with use_reentrant=True, "
                "may compute gradients in a backward of its own"
            )
        return dict(zip(parameters, found, strict=True))

    def forget_graph(self) -> None:
        """Frees activations; calls can still be run again."""
        for call in self.calls:
            call.leaves = []

    @contextlib.contextmanager
    def _whole(self, records: bool) -> Iterator[None]:
        """Restores the model as in one process for a block; afterwards it is as before."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(running_again())
            stack.enter_context(apart())
            stack.enter_context(untouched(self._modules, keep_values=False))
            for module in self._modules:
                uncover(module)
            if records:
                self.recorder.watch(self._modules, self._names)
            _put(self._now, self._modules)
            stack.enter_context(_values_in(self._kept, self._device))
            if self._moved:
                nearby = {p: _nearby(p.data) for p in self._root.parameters()}
                stack.enter_context(_values_in(nearby, self._device))
            written = KeptValues(self._modules)
            stack.callback(written.restore)
            stack.enter_context(written)
            stack.enter_context(_Operators(self.rounded))
            before = _contents_of(self._modules)
            yield
            if records:
                self._leaves_contents |= _ids(_contents_of(self._modules)) != _ids(before)
                after = _state_of(self._modules)
                self._left = {k: v for k, v in after.items() if _has_changed(k, v, self._now)}


#: buffers and attributes of modules, by number of the module, whether it is a buffer, and name
_State = dict[tuple[int, bool, str], Any]


def _state_of(modules: Sequence[nn.Module]) -> _State:
    """Returns the state; tensors are copies, which share as the originals do."""
    found: _State = {}
    for number, module in enumerate(modules):
        found |= {(number, True, name): buffer for name, buffer in module._buffers.items()}
        attributes = module.__dict__.items()
        found |= {(number, False, k): v for k, v in attributes if k not in _NO_STATE}
    return _cloned(found)


def _put(state: _State, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module._buffers.clear()
    # These are copies again: writing to the originals would spoil graphs that use them.
    for (number, is_buffer, name), value in _cloned(state).items():
        table = modules[number]._buffers if is_buffer else modules[number].__dict__
        table[name] = value


def _cloned(state: _State) -> _State:
    """Returns the values with copies of tensors that have no gradients."""
    copies: dict[int, Tensor] = {}

    def cloned(value: Any) -> Any:
        if type(value) is not Tensor or value.requires_grad:
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]

    return {key: cloned(value) for key, value in state.items()}


def _has_changed(key: tuple[int, bool, str], value: Any, before: _State) -> bool:
    known = before.get(key, before)
    if isinstance(value, Tensor) and isinstance(known, Tensor) and not value.requires_grad:
        return value.shape != known.shape or not bool((value == known).all())
    return value is not known


def _contents_of(modules: Sequence[nn.Module]) -> list[list[Any]]:
    """Returns what is in containers of modules, to notice changes; `untouched` restores them."""
    return [
        [*value, *(value.values() if isinstance(value, dict) else ())]
        for module in modules
        for name, value in module.__dict__.items()
        if name not in _NO_STATE and type(value) in (list, dict)
    ]


def _ids(contents: list[list[Any]]) -> list[list[int]]:
    return [list(map(id, items)) for items in contents]


# Wrappers of a forward are not state that a call leaves.
_NO_STATE = frozenset((*nn.Module().__dict__, "forward", "_smp_forwards"))


def _is_coarser(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Returns whether a floating-point number loses digits when cast from the other dtype."""
    both = dtype.is_floating_point and other.is_floating_point
    return both and torch.finfo(dtype).eps > torch.finfo(other).eps


@contextlib.contextmanager
def _values_in(values: Mapping[nn.Parameter, Tensor], device: torch.device) -> Iterator[None]:
    """Gives parameters other data for a while."""
    before = [(parameter, parameter.data) for parameter in values]
    try:
        for parameter, value in values.items():
            parameter.data = value.to(device, parameter.dtype)  # its dtype may have changed since
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


def _nearby(value: Tensor) -> Tensor:
    """Returns the same numbers, moved by up to some units in the last place."""
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(1)  # leaves the global generator alone
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.device)
    return value * (1 + 4 * torch.finfo(value.dtype).eps * noise.to(value.dtype))


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Removes the user's hooks on parameters for a block: they are for gradients of the step."""
    tables = [p._backward_hooks for p in parameters if p._backward_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, entries in zip(tables, kept, strict=True):
            table.update(entries)


def _copy_arguments(arguments: Any) -> Any:
    leaves, spec = pytree.tree_flatten(arguments)
    memo: dict[int, Any] = {}
    return pytree.tree_unflatten([_copy_of(leaf, memo) for leaf in leaves], spec)


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, RemoteTensor):
        raise Inconclusive("an argument of the model is on another rank")
    if isinstance(value, Tensor):
        result: Any = moved(ordinary(value), value.device, copy=True)
    elif isinstance(value, _PLAIN) or callable(value):
        result = value
    else:
        try:
            result = copy.deepcopy(value)
        except Exception as error:
            raise Inconclusive(
                f"an argument of type {type(value).__name__} cannot be copied"
            ) from error
    memo[id(value)] = result
    return result


def random_state(device: torch.device) -> tuple[Any, ...]:
    """Returns the state of all generators that a model may draw from."""
    own = [bytes(torch.get_rng_state().tolist())]  # also without NumPy
    if is_accelerator(device):
        own.append(bytes(device_module(device).get_rng_state(device).tolist()))
    return (*own, state_of_others())


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    before = _C.RandomState.capture(str(device))
    try:
        with others_kept():
            yield
    finally:
        before.restore()


def draws_by_setting(modules: Iterable[nn.Module]) -> str | None:
    """Returns a module whose attributes show that it draws random numbers, or None."""
    for module in modules:
        if not module.training:
            continue
        for name, value in module.__dict__.items():
            is_rate = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float) and value > 0:
                return f"{type(module).__name__}.{name} is {value:g}"
    return None
