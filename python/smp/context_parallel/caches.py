"""Tensors in caches of attention among the arguments of a block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from smp.modules.flat import is_cache
from smp.modules.late import LateTensor


def caches_in(values: Iterable[Any]) -> list[Any]:
    """Returns the caches among arguments."""
    return [value for value in values if is_cache(value)]


def copied(value: Any) -> Any:
    """Returns a copy of a cache that shares no memory with it, without graphs; others as they are.

    Tensors that are whole when they are read are the same objects.
    """
    if not is_cache(value):
        return value
    memo: dict[int, Any] = {}
    for _, tensor in _places([value]):
        memo[id(tensor)] = tensor if isinstance(tensor, LateTensor) else tensor.detach().clone()
    return copy.deepcopy(value, memo)


class CacheChanges:
    """Finds the tensors that a call adds to caches.

    Args:
        values: arguments of the call.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._caches = caches_in(values)
        self._known = {id(tensor): tensor for _, tensor in _places(self._caches)}

    def added(self) -> list[Tensor]:
        """Returns new tensors, in the order of their places."""
        return [tensor for _, tensor in self._new()]

    def replace(self, tensors: Iterable[Tensor]) -> None:
        """Puts others in the places of new tensors, in the same order."""
        for (put, _), tensor in zip(list(self._new()), tensors, strict=True):
            put(tensor)

    def _new(self) -> Iterator[tuple[Callable[[Tensor], None], Tensor]]:
        for place in _places(self._caches):
            if id(place[1]) not in self._known:
                yield place


def _places(
    value: Any, seen: set[int] | None = None
) -> Iterator[tuple[Callable[[Tensor], None], Tensor]]:
    """Yields tensors in attributes, lists and dictionaries, each with what replaces it."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list):
        holder: Any = value
        items: Iterable[Any] = enumerate(list(value))
    else:
        holder = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        items = list(holder.items())
    for key, item in items:
        if isinstance(item, Tensor):
            yield _put(holder, key), item
        elif isinstance(item, list | dict) or _is_object(item):
            yield from _places(item, seen)


def _put(holder: Any, key: Any) -> Callable[[Tensor], None]:
    def put(tensor: Tensor) -> None:
        holder[key] = tensor

    return put


def _is_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | type)
        and not callable(value)
    )
