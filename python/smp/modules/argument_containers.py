"""Finds changes that a call makes to containers and plain objects among its arguments.

On another rank, and in a checkpoint, a function gets copies of its arguments. Changes of the copies
are described in a form that can be sent and split into tensors. They are then applied to the
caller's own containers.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

import smp._C as _C
from smp.modules import containers
from smp.modules.containers import are_same
from smp.modules.flat import is_cache


class _Kind(Enum):
    LIST = auto()
    DICT = auto()
    SET = auto()
    OBJECT = auto()  # only attributes
    TUPLE = auto()  # contains other values and does not change
    NUMBER = auto()  # number or text, which an equal one can replace
    OTHER = auto()


_KINDS: dict[type, _Kind] = {
    list: _Kind.LIST,
    deque: _Kind.LIST,
    dict: _Kind.DICT,
    OrderedDict: _Kind.DICT,
    defaultdict: _Kind.DICT,
    set: _Kind.SET,
    tuple: _Kind.TUPLE,
    types.SimpleNamespace: _Kind.OBJECT,
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes), _Kind.NUMBER),
    **dict.fromkeys((Tensor, nn.Parameter), _Kind.OTHER),
}
_WITHOUT: set[type] = set()  # types of numbers and others that were met
_NO_OBJECTS = (
    *(Tensor, nn.Module, Enum, type, types.ModuleType),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)


def _kind_of(value: Any) -> _Kind:
    cls = type(value)
    kind = _KINDS.get(cls)
    if kind is None:
        if issubclass(cls, tuple):
            kind = _Kind.TUPLE
        else:
            kind = _Kind.OBJECT if _is_plain(cls) and not is_cache(value) else _Kind.OTHER
        _KINDS[cls] = kind
    return kind


def _is_plain(cls: type) -> bool:
    """Returns whether instances are defined by their attributes alone, also for pickle."""
    if issubclass(cls, _NO_OBJECTS) or getattr(cls, "__dictoffset__", 0) == 0:
        return False
    own: Any = cls
    if own.__reduce_ex__ is not object.__reduce_ex__ or own.__reduce__ is not object.__reduce__:
        return False
    if getattr(own, "__getstate__", None) is not getattr(object, "__getstate__", None):
        return False
    special = ("__setstate__", "__getnewargs__", "__getnewargs_ex__")
    if any(hasattr(own, name) for name in special):
        return False
    return all(base.__dict__.get("__slots__", ()) == () for base in cls.__mro__)


@dataclass(frozen=True)
class ContainerRef:
    """A reference to one of the caller's containers."""

    number: int


@dataclass(frozen=True)
class ItemRef:
    """A reference to an earlier item of one of the caller's containers."""

    number: int
    position: int


#: Number of a container, and its contents now: a list, or a dictionary for dictionaries and
#: attributes.
Change = tuple[int, list[Any] | dict[Any, Any]]


class ArgumentContainers:
    """The containers among some arguments, in the same order as in copies of the arguments.

    Args:
        value: arguments.
        objects: whether objects count as containers of their attributes.
    """

    def __init__(self, value: Any, objects: bool = True) -> None:
        self.containers: list[Any] = []
        self._objects = objects
        self._find((value,), set())
        self._before = [contents_of(container) for container in self.containers]

    @classmethod
    def of_call(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], objects: bool = True
    ) -> ArgumentContainers:
        """Returns the containers among the arguments of a call."""
        return cls((*args, *kwargs.values()), objects)

    def _find(self, items: Sequence[Any], seen: set[int]) -> None:
        for item in items:
            if type(item) in _WITHOUT:
                continue
            kind = _kind_of(item)
            if kind is _Kind.TUPLE:
                self._find(item, seen)
            elif kind is _Kind.NUMBER or kind is _Kind.OTHER:
                _WITHOUT.add(type(item))
            elif id(item) not in seen and (self._objects or kind is not _Kind.OBJECT):
                seen.add(id(item))
                self.containers.append(item)
                if kind is not _Kind.SET:  # a set has no order that copies share
                    self._find(contents_of(item), seen)

    # ---- the rank that has the copies

    def changed(self) -> list[int]:
        """Returns the numbers of the containers whose contents have changed."""
        return [
            number
            for number, (container, before) in enumerate(
                zip(self.containers, self._before, strict=True)
            )
            if not are_same(contents_of(container), before)
        ]

    def new_items(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yields each container that was changed, with its new items."""
        for number in self.changed():
            yield self.containers[number], self.new_items_of(number)

    def new_items_of(self, number: int) -> list[Any]:
        """Returns the new items of one container."""
        known = set(map(id, self._before[number]))
        return [item for item in contents_of(self.containers[number]) if id(item) not in known]

    def changed_from(self) -> list[tuple[int, list[Any]]]:
        """Returns the numbers of changed containers, and their earlier contents."""
        return [(number, self._before[number]) for number in self.changed()]

    def changes(self) -> list[Change]:
        """Describes the changes of the containers; tensors are kept in it as they are.

        Raises:
            TypeError: a set has new elements that cannot be identified in a copy of the set.
        """
        numbers = self.changed() if self.containers else []
        if not numbers:
            return []
        references: dict[int, Any] = {}
        for number, before in enumerate(self._before):
            if _kind_of(self.containers[number]) is _Kind.SET:
                continue
            for position, item in enumerate(before):
                if _kind_of(item) is not _Kind.NUMBER:
                    references.setdefault(id(item), ItemRef(number, position))
        replace = _Replacing(references | self._own())
        return [(number, self._describe(number, replace)) for number in numbers]

    def _describe(self, number: int, replace: _Replacing) -> list[Any] | dict[Any, Any]:
        container, before = self.containers[number], self._before[number]
        kind = _kind_of(container)
        if kind is _Kind.SET:
            _check_elements(container)
            return list(container)
        items = contents_of(container)
        if kind is _Kind.LIST:
            return [
                ItemRef(number, i) if i < len(before) and item is before[i] else replace(item)
                for i, item in enumerate(items)
            ]
        half, half_before = len(items) // 2, len(before) // 2
        known = {key: half_before + i for i, key in enumerate(before[:half_before])}
        found = {}
        for key, item in zip(items[:half], items[half:], strict=True):
            position = known.get(key, -1)
            is_kept = position >= 0 and item is before[position]
            found[replace(key)] = ItemRef(number, position) if is_kept else replace(item)
        return found

    def with_references(self, result: Any) -> Any:
        """Returns a result with `ContainerRef` for each of the containers in it."""
        return _Replacing(self._own())(result) if self.containers else result

    def _own(self) -> dict[int, Any]:
        return {
            id(container): ContainerRef(number) for number, container in enumerate(self.containers)
        }

    # ---- the rank that has the originals

    def settle(self, changes: Sequence[Change], result: Any) -> Any:
        """Applies changes of copies to these containers.

        Args:
            changes: changes of `changes`.
            result: result of `with_references`.

        Returns:
            the result, with these containers in it.
        """
        if not self.containers:
            return result
        resolve = _Resolving(self.containers, self._before)
        found = [(self.containers[number], resolve(contents)) for number, contents in changes]
        for container, contents in found:
            fill(container, containers.contents_of(contents))
        return resolve(result)

    # ---- copies

    def apart(self, value: Any) -> tuple[Any, list[Any]]:
        """Returns a value with `ContainerRef` for each container, and the earlier contents so.

        Later changes of the containers are not seen there; those of other objects are.
        """
        replace = _Replacing(self._own())
        return replace(value), [list(map(replace, before)) for before in self._before]

    def templates(self) -> list[Any]:
        """Returns empty containers like these; see `copies`."""
        return list(map(_empty_like, self.containers))


def copies(templates: Sequence[Any], value: Any, contents: Sequence[list[Any]]) -> Any:
    """Rebuilds a value that was taken apart, with new containers.

    Args:
        templates: containers of `ArgumentContainers.templates`.
        value, contents: results of `ArgumentContainers.apart`.
    """
    made = list(map(_empty_like, templates))
    resolve = _Resolving(made, ())
    for container, items in zip(made, contents, strict=True):
        fill(container, list(map(resolve, items)))
    return resolve(value)


def exchanged(value: Any, others: Mapping[int, Any]) -> Any:
    """Returns a value in which some objects are replaced, by id."""
    return _Replacing(others)(value)


def exchange(container: Any, others: Mapping[int, Any]) -> None:
    """Replaces objects in a container, by id."""
    if _kind_of(container) is not _Kind.SET:
        fill(container, list(map(_Replacing(others), contents_of(container))))


def contents_of(container: Any) -> list[Any]:
    """Returns the items of a container; for dictionaries and objects keys and then values."""
    return containers.contents_of(_items_in(container))


def fill(container: Any, contents: list[Any]) -> None:
    """Replaces the contents of a container; see `contents_of`."""
    containers.fill(_items_in(container), contents)


def _items_in(container: Any) -> Any:
    return container.__dict__ if _kind_of(container) is _Kind.OBJECT else container


def _check_elements(container: set[Any]) -> None:
    if not all(map(is_number, container)):
        raise TypeError(
            f"{_C.rank_prefix()}a set among the arguments of a module that runs on another rank, "
            "or as a checkpoint, has other elements now, and not only numbers and texts are in it; "
            "use a list or a dict"
        )


def is_number(value: Any) -> bool:
    """Returns whether a value is a number, a text, None, or a tuple of such."""
    kind = _kind_of(value)
    return kind is _Kind.NUMBER or (kind is _Kind.TUPLE and all(map(is_number, value)))


def _empty_like(container: Any) -> Any:
    if isinstance(container, defaultdict):
        return defaultdict(container.default_factory)
    if isinstance(container, deque):
        return deque(maxlen=container.maxlen)
    return type(container)()


class _Replacing:
    """Replaces objects by references, in new containers around them.

    Args:
        references: references by id of the object.
    """

    def __init__(self, references: Mapping[int, Any]) -> None:
        self._references = references
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        kind = _kind_of(value)
        if kind is _Kind.NUMBER:
            return value
        known = self._references.get(id(value))
        if known is not None:
            return known
        if kind in (_Kind.OTHER, _Kind.OBJECT, _Kind.SET) or not self._holds(value, set()):
            return value
        if kind is _Kind.TUPLE:
            return _tuple_like(value, map(self, value))
        made = self._made.get(id(value))
        if made is None:
            made = self._made[id(value)] = _empty_like(value)
            fill(made, list(map(self, contents_of(value))))
        return made

    def _holds(self, value: Any, seen: set[int]) -> bool:
        """Returns whether a value contains one of the objects."""
        kind = _kind_of(value)
        if kind is _Kind.NUMBER:
            return False
        if id(value) in self._references:
            return True
        if kind not in (_Kind.LIST, _Kind.DICT, _Kind.TUPLE) or id(value) in seen:
            return False
        seen.add(id(value))
        items = value if kind is _Kind.TUPLE else contents_of(value)
        return any(self._holds(item, seen) for item in items)


class _Resolving:
    """Replaces references by objects; lists and dictionaries keep their identity.

    Args:
        containers: containers that `ContainerRef` refers to.
        contents: contents of these, which `ItemRef` refers to.
    """

    def __init__(self, containers: Sequence[Any], contents: Sequence[list[Any]]) -> None:
        self._containers = containers
        self._contents = contents
        self._seen: dict[int, Any] = {id(container): container for container in containers}

    def __call__(self, value: Any) -> Any:
        if type(value) is ContainerRef:
            return self._containers[value.number]
        if type(value) is ItemRef:
            return self._contents[value.number][value.position]
        kind = _kind_of(value)
        if kind is _Kind.TUPLE:
            items = list(map(self, value))
            return value if are_same(items, list(value)) else _tuple_like(value, items)
        if kind in (_Kind.LIST, _Kind.DICT) and id(value) not in self._seen:
            self._seen[id(value)] = value  # kept because an id is meaningless without its owner
            items = list(map(self, before := contents_of(value)))
            if not are_same(items, before):
                fill(value, items)
        return value


def _tuple_like(value: Any, items: Any) -> Any:
    if hasattr(value, "_make"):
        return value._make(items)
    return tuple(items) if type(value) is tuple else type(value)(items)
