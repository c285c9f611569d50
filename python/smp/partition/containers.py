"""Contents of dictionaries, lists, sets, queues and closures, kept, compared and put back."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

_KINDS = (dict, list, set, deque, CellType)
_MAX_DEPTH = 4


class Containers:
    """Remembers the contents of mutable containers, and those of containers inside of them.

    Objects of other classes inside of a container are not looked into.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Any]]] = {}

    def add(self, values: Iterable[Any], depth: int = 0) -> None:
        """Remembers each of ``values`` that is a container."""
        for value in values:
            if not isinstance(value, _KINDS) or id(value) in self._known:
                continue
            contents = _contents(value)
            self._known[id(value)] = (value, contents)
            if depth < _MAX_DEPTH and not isinstance(value, set):
                self.add(contents, depth + 1)

    def has_changed(self) -> bool:
        """Are other things in one of them than were?"""
        return any(not _are_same(_contents(c), before) for c, before in self._known.values())

    def restore(self) -> None:
        """Gives every container its contents back; the containers stay the same objects."""
        for container, before in self._known.values():
            # What has not changed may be read by other threads.
            if not _are_same(_contents(container), before):
                _fill(container, before)


def _contents(container: Any) -> list[Any]:
    if isinstance(container, CellType):
        try:
            return [container.cell_contents]
        except ValueError:  # not assigned yet
            return []
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _fill(container: Any, contents: list[Any]) -> None:
    if isinstance(container, CellType):
        if contents:
            container.cell_contents = contents[0]
        else:
            del container.cell_contents
    elif isinstance(container, dict):
        num = len(contents) // 2
        container.clear()
        container.update(zip(contents[:num], contents[num:], strict=True))
    elif isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        if isinstance(container, set):
            container.update(contents)
        else:
            container.extend(contents)


def reachable_from_hook(hook: Callable[..., Any]) -> list[Any]:
    """Containers that a hook may write to: of closure, globals that its code names, its object.

    Modules are left out: what is written to their attributes is looked at for all of them.
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
        found += [contents[0] for cell in cells if (contents := _contents(cell))]
        found += [hook.__globals__[n] for n in hook.__code__.co_names if n in hook.__globals__]
    else:
        found.append(hook)
    # An object keeps what it collects in its attributes.
    found += [vars(value) for value in found if _is_of_the_user(value)]
    return [value for value in found if isinstance(value, _KINDS)]


def _is_of_the_user(value: Any) -> bool:
    """An object with attributes that is neither a class, module nor function, nor a library's."""
    if isinstance(value, type | FunctionType | MethodType | nn.Module):
        return False
    if not hasattr(value, "__dict__"):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in ("torch", "numpy") and package not in sys.stdlib_module_names
