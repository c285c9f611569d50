"""Which attributes of its modules a forward writes: what a trace learns about state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from smp.module_writes import Key, ModuleWrites
from smp.partition.containers import Containers, reachable_from_hook
from smp.partition.trace_guard import hooks_of

# What a trace, PyTorch and this library keep in a module; no state of its forward.
_NOT_STATE = frozenset(vars(nn.Module())) | {
    "forward",
    "_flat_weights",
    "_flat_weight_refs",
    "_output_capturing_hooks_installed",
}


class StateWatch:
    """Compares the attributes of modules after a forward with those before.

    Args:
        modules: of the model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = [_state_of(module) for module in modules]
        self.assigned: set[Key] = set()  # another value
        self.mutated: set[Key] = set()  # a container or tensor with other contents
        self.observed: set[int] = set()  # modules with hooks that wrote to something
        self._hooks = {idx: _reached_by_hooks(module) for idx, module in enumerate(modules)}
        self._counters: set[Key] = set()
        self._containers: dict[int, set[int]] = {}  # modules that have it, by its identity

    def compare(self) -> bool:
        """Looks for what was written since this object was made; is there anything?"""
        for idx, (module, before) in enumerate(zip(self._modules, self._before, strict=True)):
            after = _state_of(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name, _MISSING), after.get(name, _MISSING)
                if old[0] is not new[0]:
                    self.assigned.add((idx, name))
                    if isinstance(new[0], int | float):
                        self._counters.add((idx, name))
                elif not _same_items(old[1], new[1]):
                    self.mutated.add((idx, name))
                    if not isinstance(new[0], Tensor):
                        self._containers.setdefault(id(new[0]), set()).add(idx)
        self.observed = {idx for idx, reached in self._hooks.items() if reached.has_changed()}
        return bool(self.assigned or self.mutated or self.observed)

    def conclude(self, uses: Set[tuple[int, int, str]], num_calls: Sequence[int]) -> ModuleWrites:
        """What follows for a model of several ranks.

        Args:
            num_calls: of each module.
            uses: (module whose code it was, module, attribute), as `around_uses` has seen them.
        """
        foreign = {(user, idx, name) for user, idx, name in uses if user != idx}
        shared = {(idx, name) for _, idx, name in foreign} & self.assigned
        ties = {(user, idx) for user, idx, name in foreign if (idx, name) in self.mutated}
        for holders in self._containers.values():
            ties |= {(min(holders), idx) for idx in holders if idx != min(holders)}
        return ModuleWrites(
            own=frozenset(self.assigned - (self._counters - shared)),
            users=frozenset(use for use in uses if use[1:] in shared),
            ties=frozenset(ties),
            observed=frozenset(self.observed),
            repeated=frozenset(
                idx
                for idx, name in self.mutated
                if num_calls[idx] > 1 and name in self._modules[idx]._buffers
            ),
        )


@contextmanager
def around_uses(
    modules: Sequence[nn.Module], keys: Set[Key], note: Callable[[int, str], None]
) -> Iterator[None]:
    """Calls ``note(idx, name)`` for each use of the attributes ``keys`` of the modules."""
    names: dict[int, list[str]] = {}
    for idx, name in keys:
        names.setdefault(idx, []).append(name)
    bases = {idx: type(modules[idx]) for idx in names}
    try:
        for idx, base in bases.items():
            body: dict[str, Any] = {name: _noted(idx, name, note) for name in names[idx]}
            body |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
            modules[idx].__class__ = type(base.__name__, (base,), body)
        yield
    finally:
        for idx, base in bases.items():
            modules[idx].__class__ = base


def _noted(idx: int, name: str, note: Callable[[int, str], None]) -> property:
    def get(module: nn.Module) -> Any:
        note(idx, name)
        if name in module.__dict__:
            return module.__dict__[name]
        return nn.Module.__getattr__(module, name)

    def set_(module: nn.Module, value: Any) -> None:
        note(idx, name)
        module.__dict__[name] = value

    def delete(module: nn.Module) -> None:
        note(idx, name)
        del module.__dict__[name]

    return property(get, set_, delete)


def _reached_by_hooks(module: nn.Module) -> Containers:
    reached = Containers()
    for hook in hooks_of(module):
        reached.add(reachable_from_hook(hook))
    return reached


_MISSING: tuple[Any, Any] = (object(), None)


def _state_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Value of each attribute and buffer, and what tells whether it was changed in place."""
    plain = {
        name: (value, _items(value))
        for name, value in module.__dict__.items()
        if name not in _NOT_STATE and not name.startswith("_smp_")
    }
    return plain | {name: (value, _items(value)) for name, value in module._buffers.items()}


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, Tensor):
        return None if value.is_inference() else [value._version]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | set | deque) else None


def _same_items(old: list[Any] | None, new: list[Any] | None) -> bool:
    if old is None or new is None:
        return old is new
    return len(old) == len(new) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(old, new, strict=True)
    )
