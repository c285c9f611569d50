"""Containers and plain objects among the arguments of a call, and what the call does to them.

On another rank, and as a checkpoint, a function gets copies of its arguments. What it puts into the
copies is told in a form that travels and that can be taken apart into tensors, and is then done to
the caller's own.
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
from smp.modules.flat import is_cache


class _Kind(Enum):
    LIST = auto()
    DICT = auto()
    SET = auto()
    OBJECT = auto()  # attributes, and nothing else
    TUPLE = auto()  # holds others and does not change
    NUMBER = auto()  # or text: an equal one is as good
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
_WITHOUT: set[type] = set()  # numbers and others that were met
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
    """Are instances what their attributes are, and does pickle think so too?"""
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
class Own:
    """Stands for one of the caller's containers."""

    number: int


@dataclass(frozen=True)
class Kept:
    """Stands for what the caller has had in one of its containers."""

    number: int
    position: int


#: Number of a container, and what is in it now: a list, or a dictionary for dictionaries and
#: attributes.
Change = tuple[int, list[Any] | dict[Any, Any]]


class Given:
    """The containers among some arguments, in an order that copies of the arguments have as well.

    Args:
        value: arguments.
        objects: objects count as containers of their attributes.
    """

    def __init__(self, value: Any, objects: bool = True) -> None:
        self.containers: list[Any] = []
        self._objects = objects
        self._find((value,), set())
        self._before = [contents_of(container) for container in self.containers]

    @classmethod
    def to(cls, args: Sequence[Any], kwargs: Mapping[str, Any], objects: bool = True) -> Given:
        """Those among the arguments of a call."""
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
                if kind is not _Kind.SET:  # has no order that copies share
                    self._find(contents_of(item), seen)

    # ---- the rank that has the copies

    def changed(self) -> list[int]:
        """Numbers of the containers in which there is something else now."""
        return [
            number
            for number, (container, before) in enumerate(
                zip(self.containers, self._before, strict=True)
            )
            if not _are_same(contents_of(container), before)
        ]

    def new_items(self) -> Iterator[tuple[Any, list[Any]]]:
        """Each container that was changed, and what is in it now and was not."""
        for number in self.changed():
            yield self.containers[number], self.new_items_of(number)

    def new_items_of(self, number: int) -> list[Any]:
        """What is in one container now and was not."""
        known = set(map(id, self._before[number]))
        return [item for item in contents_of(self.containers[number]) if id(item) not in known]

    def changed_from(self) -> list[tuple[int, list[Any]]]:
        """Numbers of containers in which there is something else now, and what was in them."""
        return [(number, self._before[number]) for number in self.changed()]

    def changes(self) -> list[Change]:
        """What was done to the containers; tensors are in it as they are.

        Raises:
            TypeError: a set has got something that cannot be told apart in a copy of the set.
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
                    references.setdefault(id(item), Kept(number, position))
        replace = _Replacing(references | self._own())
        return [(number, self._told(number, replace)) for number in numbers]

    def _told(self, number: int, replace: _Replacing) -> list[Any] | dict[Any, Any]:
        container, before = self.containers[number], self._before[number]
        kind = _kind_of(container)
        if kind is _Kind.SET:
            _check_elements(container)
            return list(container)
        items = contents_of(container)
        if kind is _Kind.LIST:
            return [
                Kept(number, i) if i < len(before) and item is before[i] else replace(item)
                for i, item in enumerate(items)
            ]
        half, half_before = len(items) // 2, len(before) // 2
        known = {key: half_before + i for i, key in enumerate(before[:half_before])}
        found = {}
        for key, item in zip(items[:half], items[half:], strict=True):
            position = known.get(key, -1)
            is_kept = position >= 0 and item is before[position]
            found[replace(key)] = Kept(number, position) if is_kept else replace(item)
        return found

    def told(self, result: Any) -> Any:
        """A result, with `Own` for each of the containers in it."""
        return _Replacing(self._own())(result) if self.containers else result

    def _own(self) -> dict[int, Any]:
        return {id(container): Own(number) for number, container in enumerate(self.containers)}

    # ---- the rank that has the originals

    def settle(self, changes: Sequence[Change], result: Any) -> Any:
        """Does to these containers what was done to copies of them.

        Args:
            changes: see `changes`.
            result: see `told`.

        Returns:
            the result, with these containers in it.
        """
        if not self.containers:
            return result
        resolve = _Resolving(self.containers, self._before)
        found = [(self.containers[number], resolve(contents)) for number, contents in changes]
        for container, contents in found:
            fill(container, _flat(contents))
        return resolve(result)

    # ---- copies

    def apart(self, value: Any) -> tuple[Any, list[Any]]:
        """A value with `Own` for each container, and what was in these, in the same form.

        Changes of the containers do not show there, those of objects of other kinds do.
        """
        replace = _Replacing(self._own())
        return replace(value), [list(map(replace, before)) for before in self._before]

    def templates(self) -> list[Any]:
        """Empty containers like these; see `copies`."""
        return list(map(_empty_like, self.containers))


def copies(templates: Sequence[Any], value: Any, contents: Sequence[list[Any]]) -> Any:
    """The value that was taken apart, with containers of its own.

    Args:
        templates: see `Given.templates`.
        value, contents: see `Given.apart`.
    """
    made = list(map(_empty_like, templates))
    resolve = _Resolving(made, ())
    for container, items in zip(made, contents, strict=True):
        fill(container, list(map(resolve, items)))
    return resolve(value)


def exchanged(value: Any, others: Mapping[int, Any]) -> Any:
    """A value with other objects in the place of some, which are named by id."""
    return _Replacing(others)(value)


def exchange(container: Any, others: Mapping[int, Any]) -> None:
    """The same for what is in a container, which stays the same one."""
    if _kind_of(container) is not _Kind.SET:
        fill(container, list(map(_Replacing(others), contents_of(container))))


def contents_of(container: Any) -> list[Any]:
    """Items; of dictionaries and objects keys and then values."""
    kind = _kind_of(container)
    if kind is _Kind.OBJECT:
        container = container.__dict__
    elif kind is not _Kind.DICT:
        return list(container)
    return [*container.keys(), *container.values()]


def _check_elements(container: set[Any]) -> None:
    if not all(map(is_number, container)):
        raise TypeError(
            f"{_C.rank_prefix()}a set among the arguments of a module that runs on another rank, "
            "or as a checkpoint, has other elements now, and not only numbers and texts are in it; "
            "use a list or a dict"
        )


def is_number(value: Any) -> bool:
    """A number, a text, None, or a tuple of such."""
    kind = _kind_of(value)
    return kind is _Kind.NUMBER or (kind is _Kind.TUPLE and all(map(is_number, value)))


def _flat(contents: list[Any] | dict[Any, Any]) -> list[Any]:
    return contents if isinstance(contents, list) else [*contents.keys(), *contents.values()]


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def fill(container: Any, contents: list[Any]) -> None:
    """Gives a container other contents; see `contents_of`."""
    kind = _kind_of(container)
    if kind is _Kind.LIST:
        container.clear()
        container.extend(contents)
    elif kind is _Kind.SET:
        container.clear()
        container.update(contents)
    else:
        items = container.__dict__ if kind is _Kind.OBJECT else container
        half = len(contents) // 2
        items.clear()
        items.update(zip(contents[:half], contents[half:], strict=True))


def _empty_like(container: Any) -> Any:
    if isinstance(container, defaultdict):
        return defaultdict(container.default_factory)
    if isinstance(container, deque):
        return deque(maxlen=container.maxlen)
    return type(container)()


class _Replacing:
    """Puts references into the place of objects, in new containers around them.

    Args:
        references: by id of the object.
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
        """Is there one of the objects in it?"""
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
    """Puts objects into the place of references; lists and dictionaries stay the same ones.

    Args:
        containers: that `Own` stands for.
        contents: of these, which `Kept` stands for.
    """

    def __init__(self, containers: Sequence[Any], contents: Sequence[list[Any]]) -> None:
        self._containers = containers
        self._contents = contents
        self._seen: dict[int, Any] = {id(container): container for container in containers}

    def __call__(self, value: Any) -> Any:
        if type(value) is Own:
            return self._containers[value.number]
        if type(value) is Kept:
            return self._contents[value.number][value.position]
        kind = _kind_of(value)
        if kind is _Kind.TUPLE:
            items = list(map(self, value))
            return value if _are_same(items, list(value)) else _tuple_like(value, items)
        if kind in (_Kind.LIST, _Kind.DICT) and id(value) not in self._seen:
            self._seen[id(value)] = value  # keeps it, too: an id says nothing without its owner
            items = list(map(self, before := contents_of(value)))
            if not _are_same(items, before):
                fill(value, items)
        return value


def _tuple_like(value: Any, items: Any) -> Any:
    if hasattr(value, "_make"):
        return value._make(items)
    return tuple(items) if type(value) is tuple else type(value)(items)
