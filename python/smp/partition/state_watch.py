"""Finds the attributes of its modules that a forward writes, for a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smp.modules.attributes import (
    ABSENT,
    get_attribute,
    inherited,
    is_same,
    is_state,
    same_items,
    state_of,
    with_properties,
)
from smp.modules.containers import CONTAINERS, contents_of
from smp.modules.module_writes import Key, ModuleWrites
from smp.partition.containers import Containers, reachable_from_hook
from smp.partition.trace_guard import hooks_of

# Only the size of larger containers is compared: there are two comparisons per call of a module.
_MOST_ITEMS = 64


@dataclass(frozen=True)
class Use:
    """A read or write of attribute ``name`` of module ``idx`` by code of module ``user``."""

    user: int
    idx: int
    name: str
    writes: bool

    @property
    def key(self) -> Key:
        return self.idx, self.name


class StateWatch:
    """Compares the attributes of modules with those before a forward.

    A parent sets a flag of its layer, calls it and removes the flag; another one empties the caches
    of its layers when it is done. After the forward everything is as before, so attributes are also
    compared where the code of one module ends and that of another begins. Other ranks have to learn
    of differences there.

    Args:
        modules: modules of the model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._idxs = {id(module): idx for idx, module in enumerate(modules)}
        self._before = [state_of(module) for module in modules]
        self._children = [dict(module._modules) for module in modules]
        self._hooks = {idx: _reached_by_hooks(module) for idx, module in enumerate(modules)}
        self._held = [
            (idx, name, value, items)
            for idx, attributes in enumerate(self._before)
            if not type(modules[idx]).__module__.startswith("torch.nn.modules.")
            for name, (value, items) in attributes.items()
            if isinstance(value, CONTAINERS) and items is not None
        ]
        self._touched: set[Key] = set()  # attributes to compare between modules
        self.assigned: set[Key] = set()  # attributes with another value
        self.mutated: set[Key] = set()  # containers or tensors with other contents
        self.observed: set[int] = set()  # modules with hooks that wrote to something
        self.replaced: set[Key] = set()  # children that are, or were, other modules
        self._assigned_meanwhile: set[Key] = set()
        self._mutated_meanwhile: set[Key] = set()
        self._counters: set[Key] = set()
        self._of_tensors: set[int] = set()  # modules with a changed container of tensors
        self._containers: dict[int, set[int]] = {}  # modules that hold it, by its identity

    # ---- during a forward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes assignments to attributes of modules inside."""
        plain = nn.Module.__setattr__, nn.Module.__delattr__

        def noting(method: Callable[..., None]) -> Any:
            def noted(module: nn.Module, name: str, *value: Any) -> None:
                idx = self._idxs.get(id(module))
                if idx is not None and is_state(name) and name not in module._parameters:
                    self._touched.add((idx, name))
                method(module, name, *value)

            return noted

        noting_ones = noting(plain[0]), noting(plain[1])
        nn.Module.__setattr__, nn.Module.__delattr__ = noting_ones  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__setattr__, nn.Module.__delattr__ = plain  # type: ignore[method-assign]

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``forward`` of a module with a comparison before and after it."""

        @functools.wraps(forward)
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            self._look()
            try:
                return forward(*args, **kwargs)
            finally:
                self._look()

        return looked_at

    def _look(self) -> None:
        for key in list(self._touched):
            idx, name = key
            module, children = self._modules[idx], self._children[idx]
            if name in module._modules or name in children:
                if module._modules.get(name) is children.get(name):
                    continue
                self.replaced.add(key)
            else:
                old = self._before[idx].get(name, ABSENT)[0]
                if is_same(old, get_attribute(module, name)):
                    continue
                self._assigned_meanwhile.add(key)
            self._touched.discard(key)
        for idx, name, value, items in self._held:
            if _has_changed(value, items):
                self._mutated_meanwhile.add((idx, name))

    # ---- after it

    def compare(self) -> bool:
        """Finds what was written since this object was made; returns whether there is anything."""
        for idx, (module, before) in enumerate(zip(self._modules, self._before, strict=True)):
            after = state_of(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name, ABSENT), after.get(name, ABSENT)
                if old[0] is not new[0]:
                    self.assigned.add((idx, name))
                    if isinstance(new[0], int | float):
                        self._counters.add((idx, name))
                elif not same_items(old[1], new[1]):
                    self._note_mutated(idx, name, new[0])
            children, former = module._modules, self._children[idx]
            names = children.keys() | former.keys()
            self.replaced |= {(idx, n) for n in names if children.get(n) is not former.get(n)}
        for idx, name in self._mutated_meanwhile - self.mutated:
            self._note_mutated(idx, name, self._before[idx][name][0])
            self._of_tensors.add(idx)  # the next microbatch would find the contents from meanwhile
        self.observed = {idx for idx, reached in self._hooks.items() if reached.has_changed()}
        return bool(self.written or self.observed or self.replaced)

    @property
    def written(self) -> set[Key]:
        """Returns attributes and buffers whose value differed at some time."""
        return self.assigned | self.mutated | self._assigned_meanwhile

    def _note_mutated(self, idx: int, name: str, value: Any) -> None:
        self.mutated.add((idx, name))
        if isinstance(value, Tensor):
            return
        self._containers.setdefault(id(value), set()).add(idx)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            self._of_tensors.add(idx)

    def conclude(
        self, uses: Sequence[Use], hooking: Set[int], num_calls: Sequence[int]
    ) -> ModuleWrites:
        """Returns the consequences for several ranks, if each forward writes as this one did.

        Args:
            uses: uses of attributes that are written, in their order.
            hooking: modules whose code registers writing hooks on tensors.
            num_calls: number of calls of each module.
        """
        written = self.assigned | {use.key for use in uses if use.writes}
        first = {use.key: use for use in reversed(uses)}
        foreign = [use for use in uses if use.user != use.idx]
        shared = {use.key for use in foreign} & written
        ties = {(use.user, use.idx) for use in foreign if use.key in self.mutated}
        for holders in self._containers.values():
            ties |= {(min(holders), idx) for idx in holders if idx != min(holders)}
        # If a microbatch reads before it writes, the value is from the one before.
        carried = {key for key, use in first.items() if key in written and not use.writes}
        buffers = {key for key in self.mutated if self._is_buffer(key)}
        ties |= {(use.user, use.idx) for use in foreign if use.writes and self._is_buffer(use.key)}
        mixed = {idx for idx, _ in carried} | {idx for idx, _ in buffers if num_calls[idx] > 1}
        # Gradients pass from one call to the other through their caller.
        shared |= {key for key in written if num_calls[key[0]] > 1} - self._counters
        return ModuleWrites(
            own=frozenset(written - (self._counters - shared)),
            users=frozenset((use.user, *use.key) for use in uses if use.key in shared),
            ties=frozenset(ties),
            observed=frozenset(self.observed),
            mixed=frozenset(mixed | self._of_tensors | hooking),
            carried=frozenset(key for key in carried if not self._is_buffer(key)),
        )

    def _is_buffer(self, key: Key) -> bool:
        idx, name = key
        return name in self._modules[idx]._buffers


class HookWatch(TorchFunctionMode):
    """Notices hooks on tensors that code of a forward registers and that write to something.

    Args:
        running: function that returns the module whose code runs now.
    """

    def __init__(self, running: Callable[[], int]) -> None:
        super().__init__()
        self._running = running
        self.found: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.register_hook and _may_write([*args, *(kwargs or {}).values()][1]):
            self.found.add(self._running())
        return func(*args, **(kwargs or {}))


def _may_write(hook: Callable[..., Any]) -> bool:
    if isinstance(getattr(hook, "__self__", None), nn.Module):
        return True
    cells = getattr(hook, "__closure__", None) or ()
    modules = [c for cell in cells for c in contents_of(cell) if isinstance(c, nn.Module)]
    return bool(modules or [c for c in reachable_from_hook(hook) if not isinstance(c, CellType)])


@contextmanager
def around_uses(
    modules: Sequence[nn.Module], keys: Set[Key], note: Callable[[int, str, bool], None]
) -> Iterator[None]:
    """Calls ``note(idx, name, writes)`` for each use of the attributes ``keys`` of the modules."""
    names: dict[int, list[str]] = {}
    for idx, name in keys:
        names.setdefault(idx, []).append(name)
    bases = {idx: type(modules[idx]) for idx in names}
    try:
        for idx, base in bases.items():
            properties = {name: _noted(base, idx, name, note) for name in names[idx]}
            setter = _noting_buffers(base, idx, names[idx], note)
            modules[idx].__class__ = with_properties(base, properties, __setattr__=setter)
        yield
    finally:
        for idx, base in bases.items():
            modules[idx].__class__ = base


def _noting_buffers(
    base: type[nn.Module], idx: int, names: Sequence[str], note: Callable[[int, str, bool], None]
) -> Callable[[nn.Module, str, Any], None]:
    """Replaces ``__setattr__``, which writes to a buffer without calling its property."""

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if name in names and name in module._buffers:
            note(idx, name, True)
        base.__setattr__(module, name, value)

    return set_attribute


def _noted(base: type, idx: int, name: str, note: Callable[[int, str, bool], None]) -> property:
    def get(module: nn.Module) -> Any:
        note(idx, name, False)
        own = module.__dict__
        return own[name] if name in own else inherited(base, name, module)

    def set_(module: nn.Module, value: Any) -> None:
        note(idx, name, True)
        module.__dict__[name] = value

    def delete(module: nn.Module) -> None:
        note(idx, name, True)
        del module.__dict__[name]

    return property(get, set_, delete)


def _has_changed(container: Any, items: list[Any]) -> bool:
    num_items = len(container) * (2 if isinstance(container, dict) else 1)
    if num_items != len(items):
        return True
    return num_items <= _MOST_ITEMS and not same_items(items, contents_of(container))


def _reached_by_hooks(module: nn.Module) -> Containers:
    reached = Containers()
    for hook in hooks_of(module):
        reached.add(reachable_from_hook(hook))
    return reached
