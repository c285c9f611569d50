"""Attention caches of transformers, of which each rank has its own.

With its default settings a Hugging Face model makes an empty cache in each forward, hands it to all
of its layers, and returns it. In training nobody reads it. It does not travel: every rank has one
per microbatch, in which the layers of that rank leave their keys and values.
"""

from __future__ import annotations

import copy
import itertools
from contextvars import ContextVar
from typing import Any

from torch import nn

_seen: ContextVar[dict[int, Any] | None] = ContextVar("smp_caches", default=None)


def number(cache: Any) -> int:
    """Which of the caches of this step body it is; the first one is 0."""
    seen = _seen.get()
    if seen is None:
        seen = {}
        _seen.set(seen)
    for index, known in seen.items():
        if known is cache:
            return index
    seen[len(seen)] = cache
    return len(seen) - 1


def remember(index: int, cache: Any) -> None:
    """Notes that ``cache`` stands for the caller's cache with this number."""
    seen = dict(_seen.get() or {})
    seen[index] = cache
    _seen.set(seen)


def numbered(index: int) -> Any:
    """The cache with a number; None if there is none."""
    return (_seen.get() or {}).get(index)


def number_of(cache: Any) -> int | None:
    """The number of a cache that has one."""
    return next((i for i, known in (_seen.get() or {}).items() if known is cache), None)


def emptied(cache: Any) -> Any:
    """A cache of the same kind without contents."""
    contents = (vars(layer).get(name) for layer in _layers(cache) for name in ("keys", "values"))
    memo: dict[int, Any] = {id(tensor): None for tensor in contents if tensor is not None}
    empty = copy.deepcopy(cache, memo)
    for layer in _layers(empty):
        if hasattr(layer, "is_initialized"):
            layer.is_initialized = False
        if isinstance(getattr(layer, "cumulative_length", None), int):
            layer.cumulative_length = 0
    if isinstance(getattr(empty, "is_updated", None), dict):
        empty.is_updated = dict.fromkeys(empty.is_updated, False)
    return empty


def check_unfilled(cache: Any, layer_idxs: frozenset[int], where: str) -> None:
    """Raises when layers of another rank would need contents that are here.

    Of a cache for encoder and decoder, a cut between self-attention and cross-attention leaves one
    of its parts filled; that is no sign of contents from before.
    """
    parts = [part for part in _parts(cache) if hasattr(part, "layers")]
    for idx in layer_idxs:
        layers = [part.layers[idx] for part in parts if idx < len(part.layers)]
        filled = [getattr(layer, "is_initialized", False) for layer in layers]
        if filled and all(filled) and len(filled) == len(parts):
            raise ValueError(
                f"the attention cache for layer {idx} in {where} is filled already; contents "
                "are not shared between pipeline ranks: set use_cache=False in the model's "
                "configuration or in its call"
            )


def layer_idxs(module: nn.Module) -> frozenset[int]:
    """Places in a cache that a module and those below it use."""
    idxs = (getattr(child, "layer_idx", None) for child in module.modules())
    return frozenset(idx for idx in idxs if isinstance(idx, int))


def _parts(cache: Any) -> list[Any]:
    nested = [getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross")]
    return [part for part in (cache, *nested) if part is not None]


def _layers(cache: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(getattr(p, "layers", ()) for p in _parts(cache)))
