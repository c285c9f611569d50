"""Takes back tensors without data that code of a model has kept beyond its trace.

A function with `functools.lru_cache`, or a dictionary by shape, keeps what it makes in its first
call. If that call is the trace's, later calls would compute with a tensor that has no data.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

_Cached = functools._lru_cache_wrapper


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Empties caches that were filled inside, and dictionaries that keep tensors without data.

    For use around all that puts a model back as it was.
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
    for holder in gc.get_referrers(*fakes) if fakes else ():
        if isinstance(holder, dict) and not _is_namespace(holder):
            for key in [key for key, value in holder.items() if id(value) in ids]:
                # An output of a model that forbids it is no cache: the trace's error holds it.
                with suppress(Exception):
                    del holder[key]


def _caches() -> list[Any]:
    skipped = ("torch", "functools", "re", "typing", "inspect")
    return [
        obj
        for obj in gc.get_objects()
        if type(obj) is _Cached
        and (getattr(obj, "__module__", None) or "").partition(".")[0] not in skipped
    ]


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Is it the namespace of a module, class or object, and no container of the model's own?"""
    return any(
        getattr(owner, "__dict__", None) is holder
        for owner in gc.get_referrers(holder)
        if not isinstance(owner, FrameType)
    )
