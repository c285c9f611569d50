"""Observes the creation of modules, and marks them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

_Wish = TypeVar("_Wish")


class MethodWrappers:
    """Wraps methods of classes while contexts are open.

    ``__init__`` of `nn.Module` runs for new modules, ``__setstate__`` for copies and unpickled
    ones (`nn.TransformerEncoder` makes its layers by ``deepcopy``).

    Args:
        created: function that is called with each module that any thread creates or copies.
    """

    def __init__(self, created: Callable[[nn.Module], None]) -> None:
        self._created = created
        self._lock = threading.RLock()
        self._num_open = 0
        self._wrapped: dict[tuple[type, str], tuple[Any, Any]] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Wraps the methods inside; may be nested, and open in several threads."""
        with self._lock:
            self._num_open += 1
            for name in ("__init__", "__setstate__"):
                self.wrap(nn.Module, name, self._reporting)
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if self._num_open == 0:
                    self._unwrap()

    def wrap(self, cls: type, name: str, make: Callable[[Any], Any]) -> None:
        """Wraps a method of a class until all contexts are closed, once.

        Args:
            cls: class.
            name: name of the method; other attributes, and methods of bases, stay.
            make: function that returns the wrapper of a function.
        """
        with self._lock:
            original = cls.__dict__.get(name)
            function = original.__func__ if isinstance(original, staticmethod) else original
            if (cls, name) in self._wrapped or not inspect.isfunction(function):
                return
            wrapper = make(function)
            if isinstance(original, staticmethod):
                wrapper = staticmethod(wrapper)
            self._wrapped[cls, name] = original, wrapper
            setattr(cls, name, wrapper)

    def _unwrap(self) -> None:
        for (cls, name), (original, wrapper) in self._wrapped.items():
            # Other code may have wrapped ours since; with no context open ours does nothing.
            if cls.__dict__.get(name) is wrapper:
                setattr(cls, name, original)
        self._wrapped.clear()

    def _reporting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            method(module, *args, **kwargs)
            self._created(module)

        return wrapper


class _Open(threading.local, Generic[_Wish]):
    """Wishes of the contexts that are open in this thread, innermost last."""

    def __init__(self) -> None:
        self.wishes: list[_Wish] = []


class CreationMarks(Generic[_Wish]):
    """Marks modules that are created inside contexts with the wish of the innermost one.

    A mark is dropped with its module.
    """

    def __init__(self) -> None:
        self._marks: WeakKeyDictionary[nn.Module, _Wish] = WeakKeyDictionary()
        self._open: _Open[_Wish] = _Open()
        self._wrappers = MethodWrappers(self._mark)

    def __setitem__(self, module: nn.Module, wish: _Wish) -> None:
        self._marks[module] = wish

    def get(self, module: nn.Module) -> _Wish | None:
        """Returns the mark of a module, or None."""
        return self._marks.get(module)

    @contextmanager
    def marking(self, wish: _Wish) -> Iterator[None]:
        """Marks modules that are created inside, in this thread."""
        self._open.wishes.append(wish)
        try:
            with self._wrappers.open():
                yield
        finally:
            self._open.wishes.pop()

    def _mark(self, module: nn.Module) -> None:
        if self._open.wishes:
            self._marks[module] = self._open.wishes[-1]
