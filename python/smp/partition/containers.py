"""Contents of dictionaries, lists, sets and queues, kept and put back."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

_KINDS = (dict, list, set, deque)
_MAX_DEPTH = 4


class Containers:
    """Remembers the contents of mutable containers, and those of containers inside of them.

    Objects of other classes inside of a container are not looked into.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def add(self, values: Iterable[Any], depth: int = 0) -> None:
        """Remembers each of ``values`` that is a container."""
        for value in values:
            if not isinstance(value, _KINDS) or id(value) in self._known:
                continue
            # Plain copies: the class of a container may have a copy() of its own.
            contents = dict(value) if isinstance(value, dict) else list(value)
            self._known[id(value)] = (value, contents)
            if depth < _MAX_DEPTH and not isinstance(value, set):
                self.add(value.values() if isinstance(value, dict) else value, depth + 1)

    def restore(self) -> None:
        """Gives every container its contents back; the containers stay the same objects."""
        for container, contents in self._known.values():
            if isinstance(container, dict):
                if container.keys() == contents.keys() and all(
                    container[key] is value for key, value in contents.items()
                ):
                    continue  # what has not changed may be read by other threads
                container.clear()
                container.update(contents)
            elif isinstance(container, list):
                container[:] = contents
            else:
                container.clear()
                if isinstance(container, set):
                    container.update(contents)
                else:
                    container.extend(contents)


def reachable_from_hook(hook: Callable[..., Any]) -> list[Any]:
    """What a hook may write to: closure, globals that its code names, its object, its arguments."""
    found: list[Any] = []
    if isinstance(hook, functools.partial):
        found += [*hook.args, *hook.keywords.values()]
        found += reachable_from_hook(hook.func)
    elif isinstance(hook, MethodType):
        found += vars(hook.__self__).values() if hasattr(hook.__self__, "__dict__") else ()
        found += reachable_from_hook(hook.__func__)
    elif isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        found += [hook.__globals__[n] for n in hook.__code__.co_names if n in hook.__globals__]
    elif hasattr(hook, "__dict__"):
        found += vars(hook).values()
    # An object in a closure keeps what it collects in its attributes.
    for value in list(found):
        if not isinstance(value, _KINDS) and _is_of_the_user(value):
            found += vars(value).values()
    return found


def _is_of_the_user(value: Any) -> bool:
    """An object with attributes that is neither a class, module nor function, nor PyTorch's."""
    if isinstance(value, type | FunctionType | MethodType) or not hasattr(value, "__dict__"):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in ("torch", "numpy") and package not in sys.stdlib_module_names
