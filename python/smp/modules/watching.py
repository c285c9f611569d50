"""Switches the watching of operators on parameters on and off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_kinds: list[tuple[type[Tensor], Any]] = []
_depth = [0]


def watch(kind: type[Tensor], function: Callable[..., Any]) -> None:
    """Calls ``function`` as the ``__torch_function__`` of a class, except in `unwatched` code."""
    watching: Any = classmethod(function)
    _kinds.append((kind, watching))
    kind.__torch_function__ = watching  # type: ignore[method-assign]


@contextlib.contextmanager
def unwatched(is_wanted: bool = True) -> Iterator[None]:
    """Runs the block without watching, if that is wanted: operators on parameters cost nothing."""
    if not is_wanted:
        yield
        return
    _depth[0] += 1
    if _depth[0] == 1:
        for kind, _ in _kinds:
            kind.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    try:
        yield
    finally:
        _depth[0] -= 1
        if _depth[0] == 0:
            for kind, watching in _kinds:
                kind.__torch_function__ = watching  # type: ignore[method-assign]
