"""Handles what a checkpointed call does to the state of its modules.

A layer may keep its auxiliary loss in an attribute, which its parent reads; a hook may put features
into a dictionary. The first run of a checkpoint makes such tensors without a graph, so those that
have a graph without a checkpoint have to be results of it. Other tensors must not be results: a
moving average would be tied to the graph of the step before. A run with a graph, once,
distinguishes them.

The second run finds the same tensors and numbers as the first one, such as a counter, or a flag
that the parent has reset in between. Values that the second run leaves are removed. Lists of
numbers are changed by both runs.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

import smp._C as _C
from smp.modules.argument_containers import (
    ArgumentContainers,
    contents_of,
    exchange,
    exchanged,
    fill,
    is_number,
)
from smp.modules.attributes import MISSING, attributes_of, get_attribute, is_state, set_attribute
from smp.modules.flat import tensors_in

_AS_NOW = object()
_NUMBERS = (int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, tuple, OrderedDict, defaultdict, deque)

#: Whether tensors that are left have a graph, by the first module and by their places.
_known: WeakKeyDictionary[nn.Module, dict[Any, tuple[bool, ...]]] = WeakKeyDictionary()
#: Buffers that are written in place, by the first module; they are copied before a run.
_written: WeakKeyDictionary[nn.Module, set[tuple[int, str]]] = WeakKeyDictionary()


class StateComparison:
    """Compares the state of modules with their state when this object was made.

    Args:
        modules: modules that run; those below them are included.
        copies: whether buffers are copied, for `earlier`.
        every: whether all buffers are copied, also those that earlier runs have not written; for
            `undo`.
    """

    def __init__(
        self, modules: Sequence[nn.Module], copies: bool = True, every: bool = False
    ) -> None:
        self._first = modules[0] if modules else None
        self._modules = list(dict.fromkeys(sub for module in modules for sub in module.modules()))
        self._before = [attributes_of(module) for module in self._modules]
        values = [
            value
            for state in self._before
            for name, value in state.items()
            if type(value) in _CONTAINERS and is_state(name)
        ]
        for module in self._modules:
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                values += _held_by(hook)
        self._given = ArgumentContainers(values, objects=False)
        self._buffers = list(self._copied(copies, every))
        #: floating-point tensors that were left, and their places
        self.tensors: list[Tensor] = []
        self.places: list[Any] = []
        self._left: list[tuple[nn.Module, str, Any, Any]] = []  # value, and value before
        self._numbers: list[tuple[nn.Module, str, Any]] = []  # value before

    def _copied(
        self, copies: bool, every: bool
    ) -> Iterator[tuple[tuple[int, str], Tensor, int, Tensor | None]]:
        written = None if self._first is None else _written.get(self._first)
        for idx, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.is_inference():
                    continue
                is_copied = copies and (every or written is None or (idx, name) in written)
                copy = buffer.detach().clone() if is_copied else None
                yield (idx, name), buffer, buffer._version, copy

    def compare(self) -> StateComparison:
        """Finds values that have been left since this object was made."""
        for idx, (module, before) in enumerate(zip(self._modules, self._before, strict=True)):
            for name, old, value in _differing(module, before):
                if self._note((idx, name), [value]):
                    self._left.append((module, name, value, old))
                elif is_number(value) and (old is MISSING or is_number(old)):
                    self._numbers.append((module, name, old))
        for number in self._given.changed():
            self._note(number, self._given.new_items_of(number))
        return self

    def _note(self, place: Any, values: Sequence[Any]) -> bool:
        found = [
            tensor
            for tensor in tensors_in(list(values))
            if (tensor.is_floating_point() or tensor.is_complex())
            and not isinstance(tensor, nn.Parameter)
        ]
        self.tensors += found
        self.places += [place] * len(found)
        return bool(found)

    def replace(self, tensors: Mapping[int, Tensor]) -> None:
        """Replaces tensors that were left.

        Args:
            tensors: new tensors, by id of the old ones.

        Raises:
            ValueError: a tensor is in an object whose contents cannot be replaced.
        """
        for module, name, value, _ in self._left:
            new = exchanged(value, tensors)
            if any(id(tensor) in tensors for tensor in tensors_in(new)):
                raise ValueError(
                    f"{_C.rank_prefix()}a checkpointed module has left a tensor that needs a "
                    f"gradient in attribute '{name}' of a {type(module).__name__}, inside of a "
                    f"{type(value).__name__}; leave it there as it is, or in a list or dictionary"
                )
            set_attribute(module, name, new)
        for number in self._given.changed():
            exchange(self._given.containers[number], tensors)

    def undo(self) -> None:
        """Restores modules, their containers and buffers; needs copies of all buffers."""
        EarlierState(
            [
                (module, name, old)
                for module, before in zip(self._modules, self._before, strict=True)
                for name, old, _ in _differing(module, before)
            ],
            [(self._given.containers[n], before) for n, before in self._given.changed_from()],
            [(buffer, copy) for _, buffer, copy in self._written_buffers()],
        ).establish()

    def _written_buffers(self) -> list[tuple[tuple[int, str], Tensor, Tensor | None]]:
        return [(key, b, copy) for key, b, was, copy in self._buffers if b._version != was]

    def earlier(self) -> EarlierState:
        """Returns the earlier state of everything that has changed."""
        buffers = self._written_buffers()
        if self._first is not None:
            _written.setdefault(self._first, set()).update(key for key, _, _ in buffers)
        return EarlierState(
            self._numbers + [(m, name, _without_graph(old)) for m, name, _, old in self._left],
            [
                (self._given.containers[number], _without_graph(before))
                for number, before in self._given.changed_from()
                if number in self.places
            ],
            [(buffer, copy) for _, buffer, copy in buffers],
            self._found(),
        )

    def _found(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        changed = {(id(m), name) for m, name, *_ in (*self._left, *self._numbers)}
        found = []
        for module, before in zip(self._modules, self._before, strict=True):
            kept = {name: _kept(value) for name, value in before.items()}
            kept |= {name: _AS_NOW for name in kept if (id(module), name) in changed}
            found.append((module, kept))
        return found


@dataclass
class EarlierState:
    """The state of modules, in places that a run has changed.

    Tensors with a graph are kept without it.

    Attributes:
        attributes: module, name and value.
        containers: containers with their contents.
        buffers: buffers with their values; None where they are not known.
        found: attributes that the run has not changed; other code may do so before the second run.
    """

    attributes: list[tuple[nn.Module, str, Any]]
    containers: list[tuple[Any, Any]]
    buffers: list[tuple[Tensor, Tensor | None]]
    found: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restores the earlier state inside the block, and the present one after it."""
        then = replace(self, attributes=self.attributes + list(self._changed_since()), found=[])
        now = EarlierState(
            [(m, name, get_attribute(m, name)) for m, name, _ in then.attributes],
            [(container, contents_of(container)) for container, _ in self.containers],
            [(buffer, buffer.detach().clone()) for buffer, _ in self.buffers],
        )
        then.establish()
        try:
            yield
        finally:
            now.establish()

    def _changed_since(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for module, found in self.found:
            for name, then, value in _differing(module, found):
                if isinstance(then, _WithGraph):
                    then = value if then.tensor() is value else _guard(then.data)
                is_known = then is not _AS_NOW and (then is not MISSING or _is_kept(value))
                if is_known and value is not then:
                    yield module, name, then

    def establish(self) -> None:
        """Restores this state."""
        for module, name, value in self.attributes:
            if value is not _AS_NOW and get_attribute(module, name) is not value:
                set_attribute(module, name, value)
        for container, contents in self.containers:
            if contents is not _AS_NOW:
                fill(container, contents)
        for buffer, value in self.buffers:
            if value is not None:  # through `data`: autograd may have saved the buffer
                buffer.data.copy_(value)


def _without_graph(value: Any) -> Any:
    """Replaces tensors with a graph by tensors that refuse gradients."""
    with_graph = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    if not with_graph:
        return value
    found = exchanged(value, {id(t): _guard(t) for t in with_graph if type(t) is Tensor})
    ids = set(map(id, with_graph))
    return _AS_NOW if any(id(tensor) in ids for tensor in tensors_in(found)) else found


def _is_kept(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or isinstance(value, Tensor)


class _WithGraph:
    """A tensor whose graph must not live until the second run."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.data = tensor.detach()


def _kept(value: Any) -> Any:
    """Returns what is kept of an attribute's value for the second run."""
    if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
        return _WithGraph(value)
    return value if _is_kept(value) else _AS_NOW


def _guard(tensor: Tensor) -> Tensor:
    guard = tensor.detach().requires_grad_()
    guard.register_hook(_refuse_gradient)
    return guard


def _refuse_gradient(grad: Tensor) -> None:
    raise ValueError(
        f"{_C.rank_prefix()}a checkpointed module computes with a tensor that was left by an "
        "earlier call, in an attribute or a container, and needs a gradient there, which a second "
        "run cannot give; hand such a state over as an argument and a result, detach it, or do "
        "not checkpoint the module"
    )


def flags_of(
    modules: Sequence[nn.Module], watch: StateComparison, try_out: Callable[[], StateComparison]
) -> tuple[bool, ...]:
    """Returns whether each tensor that was left has a graph if the modules run with one.

    Args:
        modules: modules that have run.
        watch: comparison after a run without a graph.
        try_out: function that runs them with a graph, and undoes all changes.
    """
    known = _known.setdefault(modules[0], {})
    key = (tuple(watch.places), tuple(module.training for module in modules))
    if key not in known:
        other = try_out()
        known[key] = tuple(tensor.requires_grad for tensor in other.tensors)
    return known[key]


class Flags:
    """The training modes of modules, and whether their parameters require gradients."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modes = [(m, m.training) for module in modules for m in module.modules()]
        self._needs = [(p, p.requires_grad) for module in modules for p in module.parameters()]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restores the modes and flags inside the block."""
        modes = [(m, m.training) for m, training in self._modes if m.training != training]
        needs = [(p, p.requires_grad) for p, needs in self._needs if p.requires_grad != needs]
        if modes or needs:
            self._establish()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, needed in needs:
                parameter.requires_grad_(needed)

    def _establish(self) -> None:
        for module, training in self._modes:
            module.training = training
        for parameter, needed in self._needs:
            if parameter.requires_grad != needed:
                parameter.requires_grad_(needed)


def _differing(module: nn.Module, before: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the former value and the value of each attribute with another one."""
    now = attributes_of(module)
    for name in {**now, **before}:
        old, value = before.get(name, MISSING), now.get(name, MISSING)
        if value is not old and is_state(name):
            yield name, old, value


def _held_by(hook: Any) -> Iterator[Any]:
    """Yields values other than arguments that a hook can reach: by its closure or its object."""
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    held = [getattr(hook, "__self__", hook)]
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for value in held:
        yield value
        if isinstance(value, nn.Module):
            state = attributes_of(value)
            yield from (state[name] for name in state if is_state(name))
        elif not isinstance(value, type):
            yield from getattr(value, "__dict__", {}).values()
