"""Tensors that a block adds to caches and containers among its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from smp.modules.argument_containers import ArgumentContainers, is_number
from smp.modules.flat import is_cache
from smp.modules.late import LateTensor

_Put = Callable[[Any], None]


def has_caches(values: Iterable[Any]) -> bool:
    """Returns whether caches of attention are among arguments."""
    return any(is_cache(value) for value in values)


def num_tensors(cache: Any) -> int:
    """Returns the number of tensors in a cache: it is larger once a block has tokens in it."""
    return sum(1 for _ in _places(cache, _nowhere, set()))


def copied(value: Any) -> Any:
    """Returns a copy of a cache that shares no memory with it, without graphs; others as they are.

    Tensors that are whole when they are read are the same objects.
    """
    if not is_cache(value):
        return value
    memo: dict[int, Any] = {}
    for _, tensor in _places(value, _nowhere, set()):
        memo[id(tensor)] = tensor if isinstance(tensor, LateTensor) else tensor.detach().clone()
    return copy.deepcopy(value, memo)


class Additions:
    """Finds the tensors that a call adds to caches and containers among its arguments.

    Args:
        values: arguments of the call.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._containers = ArgumentContainers(values)
        caches = [value for value in values if is_cache(value)]
        self._holders = [*caches, *self._containers.containers]
        self._known = {id(tensor): tensor for _, tensor in self._every()}
        self._numbers = {place: value for place, _, value in self._counts()}

    def tensors(self) -> list[Tensor]:
        """Returns new tensors, in the order of their places."""
        return [tensor for _, tensor in self._new()]

    def others(self) -> list[Any]:
        """Returns new items of containers that hold no tensors: numbers, or names of classes."""
        return [
            item if is_number(item) else type(item).__name__
            for _, items in self._containers.new_items()
            for item in items
            if not isinstance(item, Tensor | list | dict | tuple) or is_number(item)
        ]

    def counts(self) -> list[int]:
        """Returns by how much whole numbers in caches have grown, such as those of tokens seen."""
        return [value - self._numbers.get(place, 0) for place, _, value in self._counts()]

    def count(self, more: Sequence[int]) -> None:
        """Adds to the whole numbers in caches, in the same order."""
        for (_, put, value), amount in zip(list(self._counts()), more, strict=True):
            put(value + amount)

    def _counts(self) -> Iterator[tuple[Any, _Put, int]]:
        for holder in _objects([x for x in self._holders if is_cache(x)], set()):
            for key, value in list(holder.__dict__.items()):
                if type(value) is int:
                    yield (id(holder), key), _in(holder.__dict__, key), value

    def replace(self, tensors: Iterable[Tensor]) -> None:
        """Puts others in the places of new tensors, in the same order."""
        for (put, _), tensor in zip(list(self._new()), tensors, strict=True):
            put(tensor)

    def _every(self) -> Iterator[tuple[_Put, Tensor]]:
        seen: set[int] = set()
        for holder in self._holders:
            if isinstance(holder, list | dict | tuple) or is_cache(holder):
                yield from _places(holder, _nowhere, seen)
            elif not isinstance(holder, set):
                yield from _places(holder.__dict__, _nowhere, seen)

    def _new(self) -> Iterator[tuple[_Put, Tensor]]:
        for place in self._every():
            if id(place[1]) not in self._known:
                yield place


def _objects(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields a cache's parts with attributes, in lists and attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple):
        for item in value:
            yield from _objects(item, seen)
    elif _is_of_cache(value):
        yield value
        for item in list(value.__dict__.values()):
            yield from _objects(item, seen)


def _nowhere(value: Any) -> None:
    """Replaces an argument itself, which callers do not see."""


def _places(value: Any, put: _Put, seen: set[int]) -> Iterator[tuple[_Put, Tensor]]:
    """Yields the tensors in a value, each with what replaces it there."""
    if isinstance(value, Tensor):
        yield put, value
        return
    if id(value) in seen or not (isinstance(value, list | dict | tuple) or _is_of_cache(value)):
        return
    seen.add(id(value))
    if isinstance(value, tuple):
        items = list(value)
        for idx, item in enumerate(value):
            yield from _places(item, _in_tuple(put, type(value), items, idx), seen)
        return
    holder = value if isinstance(value, list | dict) else value.__dict__
    for key, item in list(enumerate(holder) if isinstance(holder, list) else holder.items()):
        yield from _places(item, _in(holder, key), seen)


def _in(holder: Any, key: Any) -> _Put:
    def put(value: Any) -> None:
        holder[key] = value

    return put


def _in_tuple(put: _Put, cls: type, items: list[Any], idx: int) -> _Put:
    """Returns a function that replaces a tuple by one with another item."""

    def put_item(value: Any) -> None:
        items[idx] = value
        put(cls(*items) if hasattr(cls, "_make") else cls(items))

    return put_item


def _is_of_cache(value: Any) -> bool:
    """Returns whether a value is a cache or a part of one, with attributes."""
    is_part = type(value).__module__ == "transformers.cache_utils" or is_cache(value)
    return is_part and hasattr(value, "__dict__") and not isinstance(value, nn.Module)
