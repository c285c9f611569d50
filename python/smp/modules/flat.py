"""Separates nested values of any classes into tensors and the rest.

pytree handles containers and registered classes. Objects of other classes, such as dataclasses, are
taken apart into their contents and rebuilt, so that tensors in them count like any others.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smp._C as _C

#: Types of values without tensors in them, and of values that are never taken apart.
_CLOSED = (
    bytes,
    float,
    int,
    str,
    type,
    type(None),
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    nn.Module,
    torch.optim.Optimizer,
)


_COLLECTIONS = (list, tuple, set, frozenset, deque, ValuesView, ItemsView)


def is_cache(value: Any) -> bool:
    """Returns whether a value is an attention cache of transformers, without importing it."""
    return any(
        cls.__name__ == "Cache" and cls.__module__ == "transformers.cache_utils"
        for cls in type(value).__mro__
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Returns all tensors in containers, registered classes, dataclasses and attributes."""
    return list(_tensors(value, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif id(leaf) not in seen and (parts := _parts_of(leaf)) is not None:
            seen.add(id(leaf))
            yield from _tensors([parts.items, parts.slots, parts.attributes], seen)


@dataclass(frozen=True)
class _Parts:
    """The contents of an object.

    Attributes:
        items: dictionary for kinds of dictionaries, or else a list; empty if it has no items.
        slots: values by the descriptors that set them.
        attributes: values by name.
    """

    items: list[Any] | dict[Any, Any]
    slots: dict[Any, Any]
    attributes: dict[str, Any]


def _parts_of(value: Any) -> _Parts | None:
    """Returns the contents of an object; None if there are none, or it is not taken apart."""
    if isinstance(value, _CLOSED) or is_cache(value):
        return None
    items: list[Any] | dict[Any, Any] = []
    if isinstance(value, dict):
        items = dict(dict.items(value))
    elif isinstance(value, _COLLECTIONS):
        items = list(value)
    slots = {}
    for cls in type(value).__mro__:
        if "__slots__" in cls.__dict__ or cls is defaultdict:
            for slot in cls.__dict__.values():
                if isinstance(slot, types.MemberDescriptorType):
                    try:
                        slots[slot] = slot.__get__(value)
                    except AttributeError:
                        continue  # not set
    attributes = getattr(value, "__dict__", {})
    if not (items or slots or attributes):
        return None
    return _Parts(items, slots, dict(attributes))


@dataclass
class _Place:
    """The place of a tensor."""

    index: int


@dataclass
class _Object:
    """A recipe for an object that was taken apart."""

    cls: type
    parts: _Tree | None = None

    def new(self, tensors: Sequence[Any], made: dict[int, Any]) -> Any:
        """Makes the object with other tensors.

        Args:
            tensors: tensors by the index of their place.
            made: objects that exist already, by ``id`` of their `_Object`.
        """
        if id(self) in made:
            return made[id(self)]
        assert self.parts is not None
        if issubclass(self.cls, tuple):
            parts = self.parts.filled(tensors, made)
            value: Any = tuple.__new__(self.cls, parts[0])
            made[id(self)] = value
        else:
            # The object exists before its parts, which may contain it.
            value = made[id(self)] = _empty(self.cls)
            parts = self.parts.filled(tensors, made)
            if isinstance(value, list):
                list.extend(value, parts[0])
            for key, item in parts[0].items() if isinstance(value, dict) else ():
                _dict_class(self.cls).__setitem__(value, key, item)
        for slot, item in parts[1].items():
            slot.__set__(value, item)  # also of a frozen class
        if parts[2]:
            value.__dict__.update(parts[2])
        return value


@dataclass
class _Tree:
    """A value of pytree; its leaves are places, objects, or values that stay."""

    spec: Any
    leaves: list[Any] = field(default_factory=list)

    def filled(self, tensors: Sequence[Any], made: dict[int, Any]) -> Any:
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, _Place):
                leaf = tensors[leaf.index]
            elif isinstance(leaf, _Object):
                leaf = leaf.new(tensors, made)
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self.spec)


def _dict_class(cls: type) -> Any:
    return OrderedDict if issubclass(cls, OrderedDict) else dict


def _empty(cls: type) -> Any:
    if issubclass(cls, set | frozenset):
        raise ValueError(
            f"{_C.rank_prefix()}a checkpointed module takes or returns a {cls.__name__} of "
            "tensors, which has no order, so those of its second run cannot be told apart; use a "
            "list or a dict"
        )
    base: Any = object
    if issubclass(cls, dict | list):
        base = list if issubclass(cls, list) else _dict_class(cls)
    elif issubclass(cls, tuple):
        base = tuple
    try:
        return base.__new__(cls)
    except TypeError as error:
        raise ValueError(
            f"{_C.rank_prefix()}a checkpointed module takes or returns tensors in a "
            f"{cls.__module__}.{cls.__qualname__}, which cannot be made anew ({error}); use a "
            "dataclass, a list or a dict"
        ) from error


class Flat:
    """A nested value as tensors, each once, and the rest.

    Args:
        value: any value. Objects that pytree does not handle are kept, unless they contain a tensor
            that counts; then :meth:`filled` makes others of their class.
        counts: function that returns whether a tensor counts; None: all do.

    Raises:
        ValueError: an object with tensors cannot be rebuilt.
    """

    def __init__(self, value: Any, counts: Callable[[Tensor], bool] | None = None) -> None:
        self.tensors: list[Tensor] = []
        self._counts = counts
        self._places: dict[int, _Place] = {}  # by id of tensors
        self._objects: dict[int, _Object] = {}  # by id
        self._root = self._tree(value)
        # An id is meaningless without its owner.
        self._places.clear()
        self._objects.clear()

    def take(self) -> list[Tensor]:
        """Returns the tensors, and drops them here."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def filled(self, tensors: Sequence[Any], made: dict[int, Any] | None = None) -> Any:
        """Returns the value with other tensors.

        Args:
            tensors: tensors in the order of those that were taken.
            made: mapping that gets the rebuilt objects, or None.
        """
        return self._root.filled(tensors, {} if made is None else made)

    def _tree(self, value: Any) -> _Tree:
        leaves, spec = pytree.tree_flatten(value)
        return _Tree(spec, [self._node(leaf) for leaf in leaves])

    def _node(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            place = self._places.get(id(leaf))
            if place is None:
                place = self._places[id(leaf)] = _Place(len(self.tensors))
                self.tensors.append(leaf)
            return place
        if id(leaf) in self._objects:
            return self._objects[id(leaf)]
        parts = _parts_of(leaf)
        if parts is None or not self._has_some(leaf):
            return leaf
        cls = type(leaf)
        _empty(cls)  # raises early for classes that cannot be rebuilt
        node = self._objects[id(leaf)] = _Object(cls)
        node.parts = self._tree([parts.items, parts.slots, parts.attributes])
        return node

    def _has_some(self, leaf: Any) -> bool:
        found = _tensors(leaf, set())
        return any(self._counts is None or self._counts(tensor) for tensor in found)


def contents_of(value: Any) -> tuple[Any, list[Any]]:
    """Returns the contents of a rebuilt object, to be compared by :func:`is_changed`."""
    parts = _parts_of(value)
    assert parts is not None
    leaves, spec = pytree.tree_flatten([parts.items, parts.slots, parts.attributes])
    return spec, leaves


def is_changed(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> bool:
    """Returns whether the contents of an object have changed. Leaves are compared by identity."""
    if before[0] != after[0]:
        return True
    return any(was is not now for was, now in zip(before[1], after[1], strict=True))
