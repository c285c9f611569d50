"""Marks modules when they are created."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

_Wish = TypeVar("_Wish")


class _Open(threading.local, Generic[_Wish]):
    """Wishes of the contexts that are open in this thread, innermost last."""

    def __init__(self) -> None:
        self.wishes: list[_Wish] = []


class CreationMarks(Generic[_Wish]):
    """Marks modules that are created inside contexts with the wish of the innermost one.

    ``__init__`` of `nn.Module` runs for new modules, ``__setstate__`` for copies and unpickled
    ones (`nn.TransformerEncoder` makes its layers by ``deepcopy``). Both are wrapped while a
    context is open. A mark is dropped with its module.
    """

    def __init__(self) -> None:
        self._marks: WeakKeyDictionary[nn.Module, _Wish] = WeakKeyDictionary()
        self._open: _Open[_Wish] = _Open()
        self._lock = threading.Lock()
        self._num_open = 0
        self._wrapped: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def __setitem__(self, module: nn.Module, wish: _Wish) -> None:
        self._marks[module] = wish

    def get(self, module: nn.Module) -> _Wish | None:
        """Returns the mark of a module, or None."""
        return self._marks.get(module)

    @contextmanager
    def marking(self, wish: _Wish) -> Iterator[None]:
        """Marks modules that are created inside, in this thread."""
        self._open.wishes.append(wish)
        self._begin()
        try:
            yield
        finally:
            self._end()
            self._open.wishes.pop()

    def _begin(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open > 1:
                return
            for name in ("__init__", "__setstate__"):
                original = getattr(nn.Module, name)
                wrapper = self._recording(original)
                self._wrapped[name] = (original, wrapper)
                setattr(nn.Module, name, wrapper)

    def _end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open > 0:
                return
            for name, (original, wrapper) in self._wrapped.items():
                # Other code may have wrapped ours; with no context open it does nothing.
                if getattr(nn.Module, name) is wrapper:
                    setattr(nn.Module, name, original)
            self._wrapped.clear()

    def _recording(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            method(module, *args, **kwargs)
            if self._open.wishes:
                self._marks[module] = self._open.wishes[-1]

        return wrapper
