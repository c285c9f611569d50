"""Finds the attributes of its modules that a forward writes, for a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smp.modules.attributes import MISSING, same_items, state_of
from smp.modules.module_writes import Key, ModuleWrites
from smp.partition.containers import Containers, reachable_from_hook
from smp.partition.passing_writes import PassingWrites
from smp.partition.trace_guard import hooks_of


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
    """Compares the attributes of modules after a forward with those before.

    Args:
        modules: modules of the model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = [state_of(module) for module in modules]
        self._children = [dict(module._modules) for module in modules]
        self._hooks = {idx: _reached_by_hooks(module) for idx, module in enumerate(modules)}
        self.assigned: set[Key] = set()  # attributes with another value
        self.mutated: set[Key] = set()  # containers or tensors with other contents
        self.observed: set[int] = set()  # modules with hooks that wrote to something
        self.replaced: set[Key] = set()  # children that are other modules
        self.passing = PassingWrites(modules, self._before)
        self._counters: set[Key] = set()
        self._of_tensors: set[int] = set()  # modules with a changed container of tensors
        self._containers: dict[int, set[int]] = {}  # modules that hold it, by its identity

    def compare(self) -> bool:
        """Finds what was written since this object was made; returns whether there is anything."""
        for idx, (module, before) in enumerate(zip(self._modules, self._before, strict=True)):
            after = state_of(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name, MISSING), after.get(name, MISSING)
                if old[0] is not new[0]:
                    self.assigned.add((idx, name))
                    if isinstance(new[0], int | float):
                        self._counters.add((idx, name))
                elif not same_items(old[1], new[1]):
                    self._note_mutated(idx, name, new[0])
            children, before_it = module._modules, self._children[idx]
            names = children.keys() | before_it.keys()
            self.replaced |= {
                (idx, name) for name in names if children.get(name) is not before_it.get(name)
            }
        for idx, name in self.passing.mutated - self.mutated:
            self._note_mutated(idx, name, self._before[idx][name][0])
            self._of_tensors.add(idx)  # the next microbatch would find the contents from meanwhile
        self.replaced |= self.passing.replaced
        self.observed = {idx for idx, reached in self._hooks.items() if reached.has_changed()}
        return bool(self.written or self.observed or self.replaced)

    @property
    def written(self) -> set[Key]:
        """Returns attributes and buffers whose value differed at some time."""
        return self.assigned | self.mutated | self.passing.assigned

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
    modules = [cell for cell in cells if isinstance(_content(cell), nn.Module)]
    return bool(modules or [c for c in reachable_from_hook(hook) if not isinstance(c, CellType)])


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


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
            body: dict[str, Any] = {name: _noted(base, idx, name, note) for name in names[idx]}
            body["__setattr__"] = _noting_buffers(base, idx, names[idx], note)
            body |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
            modules[idx].__class__ = type(base.__name__, (base,), body)
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
        if name in module.__dict__:
            return module.__dict__[name]
        if hasattr(base, name):
            return getattr(base, name)
        return nn.Module.__getattr__(module, name)

    def set_(module: nn.Module, value: Any) -> None:
        note(idx, name, True)
        module.__dict__[name] = value

    def delete(module: nn.Module) -> None:
        note(idx, name, True)
        del module.__dict__[name]

    return property(get, set_, delete)


def _reached_by_hooks(module: nn.Module) -> Containers:
    reached = Containers()
    for hook in hooks_of(module):
        reached.add(reachable_from_hook(hook))
    return reached
