"""Keeps, compares and restores contents of dictionaries, lists, sets, queues and closures."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from smp.modules.containers import CONTAINERS, are_same, contents_of, fill

_KINDS = (*CONTAINERS, CellType)
_MAX_DEPTH = 4
# Depth down to which objects are kept; deeper ones (a trainer's logger) hold no model state.
_MAX_OBJECT_DEPTH = 2


class Containers:
    """A record of the contents of mutable containers and of containers inside of them.

    Args:
        objects: whether attributes of objects of the user's classes are kept as well, such as
            tables of positions that are no modules and fill themselves at their first call.
    """

    def __init__(self, objects: bool = False) -> None:
        self._known: dict[int, tuple[Any, list[Any]]] = {}
        self._objects = objects

    def add(self, values: Iterable[Any], depth: int = 0) -> None:
        """Remembers each of ``values`` that is a container."""
        for value in values:
            if not isinstance(value, _KINDS):
                is_looked_into = self._objects and depth <= _MAX_OBJECT_DEPTH
                value = attributes_of(value) if is_looked_into and not _is_ours(value) else None
                if value is None:
                    continue
            if id(value) in self._known:
                continue
            contents = contents_of(value)
            self._known[id(value)] = (value, contents)
            if depth < _MAX_DEPTH and not isinstance(value, set):
                self.add(contents, depth + 1)

    def has_changed(self) -> bool:
        """Returns whether the contents of a container have changed."""
        return any(not are_same(contents_of(c), before) for c, before in self._known.values())

    def restore(self) -> None:
        """Gives every container its contents back; the containers stay the same objects."""
        for container, before in self._known.values():
            # Other threads may read a container that has not changed.
            if not are_same(contents_of(container), before):
                fill(container, before)


def reachable_from_hook(hook: Callable[..., Any]) -> list[Any]:
    """Returns containers that a hook may write to: in its closure, object, or named globals.

    Modules are left out: their attributes are compared for all of them.
    """
    found: list[Any] = []
    if isinstance(hook, functools.partial):
        found += [*hook.args, *hook.keywords.values()]
        found += reachable_from_hook(hook.func)
    elif isinstance(hook, MethodType):
        found.append(hook.__self__)
        found += reachable_from_hook(hook.__func__)
    elif isinstance(hook, FunctionType):
        cells = hook.__closure__ or ()
        found += cells
        found += [contents[0] for cell in cells if (contents := contents_of(cell))]
        found += [hook.__globals__[n] for n in hook.__code__.co_names if n in hook.__globals__]
    else:
        found.append(hook)
    # An object keeps what it collects in its attributes.
    found += [own for value in found if (own := attributes_of(value)) is not None]
    return [value for value in found if isinstance(value, _KINDS)]


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object of a user's class; None for other objects."""
    if isinstance(value, type | FunctionType | MethodType | nn.Module):
        return None
    package = type(value).__module__.partition(".")[0]
    if package in ("torch", "numpy") or package in sys.stdlib_module_names:
        return None
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else None


def _is_ours(value: Any) -> bool:
    """Returns whether smp owns the object; a trace may change such objects on modules."""
    return type(value).__module__.partition(".")[0] == "smp"
