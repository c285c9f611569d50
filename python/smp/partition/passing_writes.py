"""Finds what a forward writes to its modules and restores before its end.

A parent sets a flag of its layer, calls it and removes the flag; another one empties the caches
of its layers when it is done. After the forward everything is as before, so modules are compared
where the code of one module ends and that of another begins. Other ranks have to learn of
differences there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from smp.modules.attributes import MISSING, is_same, is_state, items_of_container, same_items
from smp.modules.module_writes import Key

# Only the size of larger containers is compared: there are two comparisons per call of a module.
_MOST_ITEMS = 64


class PassingWrites:
    """Compares attributes with their values from before, whenever a module begins or ends.

    Args:
        modules: modules of the model.
        before: values and items of attributes and buffers by name, per module.
    """

    def __init__(
        self, modules: Sequence[nn.Module], before: Sequence[Mapping[str, tuple[Any, Any]]]
    ) -> None:
        self._modules = modules
        self._before = before
        self._children = [dict(module._modules) for module in modules]
        self._idxs = {id(module): idx for idx, module in enumerate(modules)}
        self._touched: set[Key] = set()
        self._containers = [
            (idx, name, value, items)
            for idx, attributes in enumerate(before)
            if not type(modules[idx]).__module__.startswith("torch.nn.modules.")
            for name, (value, items) in attributes.items()
            if items_of_container(value) is not None
        ]
        self.assigned: set[Key] = set()  # they had another value meanwhile
        self.mutated: set[Key] = set()  # they had other contents meanwhile
        self.replaced: set[Key] = set()  # children that were other modules meanwhile

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes assignments to attributes of modules inside; for the forward of a trace."""
        plain_set, plain_delete = nn.Module.__setattr__, nn.Module.__delattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            self._note(module, name)
            plain_set(module, name, value)

        def delete_attribute(module: nn.Module, name: str) -> None:
            self._note(module, name)
            plain_delete(module, name)

        nn.Module.__setattr__ = set_attribute  # type: ignore[assignment, method-assign]
        nn.Module.__delattr__ = delete_attribute  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            nn.Module.__setattr__ = plain_set  # type: ignore[method-assign]
            nn.Module.__delattr__ = plain_delete  # type: ignore[method-assign]

    def wrap(self, idx: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``forward`` of a module with a comparison before and after it."""

        @functools.wraps(forward)
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            self._look()
            try:
                return forward(*args, **kwargs)
            finally:
                self._look()

        return looked_at

    def _note(self, module: nn.Module, name: str) -> None:
        idx = self._idxs.get(id(module))
        if idx is not None and is_state(name) and name not in module._parameters:
            self._touched.add((idx, name))

    def _look(self) -> None:
        for key in list(self._touched):
            idx, name = key
            module, children = self._modules[idx], self._children[idx]
            if name in module._modules or name in children:
                if module._modules.get(name) is not children.get(name):
                    self._touched.discard(key)
                    self.replaced.add(key)
                continue
            table = module._buffers if name in module._buffers else module.__dict__
            if not is_same(self._before[idx].get(name, MISSING)[0], table.get(name, MISSING[0])):
                self._touched.discard(key)
                self.assigned.add(key)
        for idx, name, value, items in self._containers:
            if _has_changed(value, items):
                self.mutated.add((idx, name))


def _has_changed(container: Any, items: list[Any]) -> bool:
    num_items = len(container) * (2 if isinstance(container, dict) else 1)
    if num_items != len(items):
        return True
    return num_items <= _MOST_ITEMS and not same_items(items, items_of_container(container))
