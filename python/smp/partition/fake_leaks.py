"""Removes tensors without data that code of a model has kept beyond its trace.

A function with `functools.lru_cache`, or a dictionary by shape, keeps what it makes in its first
call. If that call is the trace's, later calls would compute with a tensor that has no data.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

_Cached = functools._lru_cache_wrapper
_METHODS = (staticmethod, classmethod)
# Top-level modules whose caches hold no tensors of a model.
_SKIPPED = frozenset(("torch", "functools", "re", "typing", "inspect"))


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Empties caches that were filled inside, and dictionaries that keep tensors without data.

    It is used around everything that restores a model.
    """
    misses = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses != misses.get(id(cache), 0):
                cache.cache_clear()
        if _fakes():
            gc.collect()  # most of them are in cycles only
            _clear_dictionaries(_fakes())


def _fakes() -> list[Any]:
    return [obj for obj in gc.get_objects() if type(obj) is FakeTensor]


def _clear_dictionaries(fakes: list[Any]) -> None:
    ids = {id(tensor) for tensor in fakes}
    holders = [
        holder
        for holder in (gc.get_referrers(*fakes) if fakes else ())
        if isinstance(holder, dict) and not _is_namespace(holder)
    ]
    holders += [obj for obj in _frozen_objects() if type(obj) is dict]
    for holder in holders:
        for key in [key for key, value in holder.items() if id(value) in ids]:
            # A model output that forbids deletion is no cache: the trace's error holds it.
            with contextlib.suppress(Exception):
                del holder[key]


def _caches() -> list[Any]:
    every = itertools.chain(gc.get_objects(), _frozen_objects())
    found = {id(obj): obj for obj in every if type(obj) is _Cached}
    return [
        cache
        for cache in found.values()
        if (getattr(cache, "__module__", None) or "").partition(".")[0] not in _SKIPPED
    ]


def _frozen_objects() -> Iterator[Any]:
    """Yields objects that modules, their classes and functions hold, if the collector is frozen.

    After `gc.freeze`, which scripts call to keep pages shared with processes that they fork, the
    collector lists neither the objects that existed before nor their referrers.
    """
    if not gc.get_freeze_count():
        return
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] in _SKIPPED:
            continue
        for value in list(vars(module).values()):
            yield from _with_contents(value)
            if isinstance(value, type) and value.__module__ == name:
                for member in list(vars(value).values()):
                    yield from _with_contents(member)


def _with_contents(value: Any) -> Iterator[Any]:
    """Yields an object and, if it is or wraps a function, the function and its closure."""
    yield value
    function = getattr(value, "__func__", value) if type(value) in _METHODS else value
    if function is not value:
        yield function
    for cell in (function.__closure__ or ()) if isinstance(function, FunctionType) else ():
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield cell.cell_contents


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Returns whether a dictionary is the namespace of a module, class or object."""
    return any(
        getattr(owner, "__dict__", None) is holder
        for owner in gc.get_referrers(holder)
        if not isinstance(owner, FrameType)
    )
