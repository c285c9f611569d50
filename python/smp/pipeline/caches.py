"""Attention caches of transformers; each rank has its own.

With its default settings a Hugging Face model makes an empty cache in each forward, passes it to
all of its layers, and returns it. In training it is never read. It does not travel: every rank has
one per microbatch, in which the layers of that rank keep their keys and values.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smp._C as _C

# Place of a module that is given its place in each call.
ALL_PLACES = -1

_seen: ContextVar[dict[int, Any] | None] = ContextVar("smp_caches", default=None)


def number(cache: Any) -> int:
    """Returns the number of a cache among those of this step body; the first one is 0."""
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
    """Stores ``cache`` under the number of the caller's cache that it replaces."""
    seen = dict(_seen.get() or {})
    seen[index] = cache
    _seen.set(seen)


def numbered(index: int) -> Any:
    """Returns the cache with a number; None if there is none."""
    return (_seen.get() or {}).get(index)


def number_of(cache: Any) -> int | None:
    """Returns the number of a cache, or None."""
    return next((i for i, known in (_seen.get() or {}).items() if known is cache), None)


def emptied(cache: Any, config: Any = None) -> Any:
    """Returns a cache of the same construction without contents.

    Args:
        cache: cache of any class of transformers.
        config: configuration of the model, which some layers of caches are made with.

    Raises:
        ValueError: a layer with contents is of a class whose constructor fails here.
    """
    unused = {id(layer): _unused(layer, config) for layer in _layers(cache)}
    contents = [tensor for layer in _layers(cache) for tensor in _tensors(vars(layer))]
    contents += [tensor for part in _parts(cache) for tensor in _tensors(_beside_layers(part))]
    memo: dict[int, Any] = {id(tensor): None for tensor in contents}
    for layer in _layers(cache):
        if unused[id(layer)] is not layer:
            memo[id(layer)] = unused[id(layer)]
        else:  # numbers and settings
            memo.update((id(tensor), tensor.clone()) for tensor in _tensors(vars(layer)))
    empty = copy.deepcopy(cache, memo)
    if isinstance(getattr(empty, "is_updated", None), dict):
        empty.is_updated = dict.fromkeys(empty.is_updated, False)
    return empty


def _unused(layer: Any, config: Any) -> Any:
    """Returns a layer as it is made; the same one if it is empty.

    The constructor determines the state of an unused layer, whatever it consists of: lengths,
    flags, empty dictionaries. Layers keep its arguments under their names.
    """
    if not any(map(_is_content, _tensors(vars(layer)))):
        return layer
    cls = type(layer)
    arguments: dict[str, Any] = {}
    for base in cls.__mro__:
        for name, parameter in _parameters_of(base).items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                continue
            if name in vars(layer):
                arguments.setdefault(name, vars(layer)[name])
            elif name == "config" and config is not None:
                decoder = getattr(config, "get_text_config", None)
                arguments[name] = config if decoder is None else decoder(decoder=True)
        if not _takes_more(base):
            break
    try:
        return cls(**arguments)
    except Exception as error:
        raise ValueError(
            f"{_C.rank_prefix()}a cache with layers of class {cls.__name__} was passed to a module "
            f"on another rank, and an empty one cannot be created there ({error}): set "
            "use_cache=False in the model's configuration or in its call"
        ) from error


def _parameters_of(cls: type) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of the constructor that a class has or inherits."""
    return inspect.signature(cast("Any", cls).__init__).parameters


def _takes_more(cls: type) -> bool:
    """Returns whether the constructor of a class takes arguments that it does not name."""
    return any(p.kind == p.VAR_KEYWORD for p in _parameters_of(cls).values())


def _is_content(tensor: Tensor) -> bool:
    """Returns False for a single number: it is a length or a setting from construction."""
    return tensor.dim() > 1 or tensor.numel() != 1


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _beside_layers(part: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name != "layers"}


def check_unfilled(
    cache: Any,
    layer_idxs: frozenset[int],
    where: str,
    here: frozenset[int] = frozenset(),
) -> None:
    """Raises ValueError when layers of another rank would need contents that are here.

    Args:
        cache: cache that is passed on.
        layer_idxs: places in it that the other rank uses.
        where: name of the module there, for the error.
        here: places that modules of this rank use as well, because a cut passes through their
            layer. Such modules have left some contents there in this call: of self-attention but
            not of cross-attention, or of attention but not of a state space. Only a layer in which
            nothing is missing has contents from before.
    """
    parts = [part for part in _parts(cache) if hasattr(part, "layers")]
    for idx in sorted(layer_idxs):
        layers = [part.layers[idx] for part in parts if 0 <= idx < len(part.layers)]
        filled = [_filled(layer) for layer in layers]
        if idx in here or ALL_PLACES in here:
            is_filled = len(filled) == len(parts) and all(map(all, filled))
        else:
            is_filled = any(map(any, filled))
        if is_filled:
            raise ValueError(
                f"{_C.rank_prefix()}the attention cache for layer {idx} in {where} is filled "
                "already; contents are not shared between pipeline ranks: set use_cache=False in "
                "the model's configuration or in its call"
            )


def _filled(layer: Any) -> list[bool]:
    """Returns for each place of a layer whether it has contents; the list is never empty.

    Places are None until they are used.
    """
    leaves = pytree.tree_leaves(vars(layer), is_leaf=lambda leaf: leaf is None)
    places = [x for x in leaves if x is None or (isinstance(x, Tensor) and _is_content(x))]
    return [place is not None and place.numel() > 0 for place in places] or [False]


def layer_idxs(module: nn.Module) -> frozenset[int]:
    """Returns the places in a cache that a module and those below it use."""
    idxs = map(_place_of, module.modules())
    return frozenset(idx for idx in idxs if idx is not None and idx >= 0)


def _place_of(module: nn.Module) -> int | None:
    """Returns the place that code of a module uses, or None.

    A numbered layer may consist of modules with numbers of their own, and only these are places
    (LongCat). The layer uses its own number if code that runs in a call names it.
    """
    idx = getattr(module, "layer_idx", None)
    if not isinstance(idx, int):
        return None
    below = (child for child in module.modules() if child is not module)
    if any(isinstance(getattr(child, "layer_idx", None), int) for child in below):
        return idx if _names_place(cast("Any", type(module))) else None
    return idx


@functools.cache
def _names_place(cls: type) -> bool:
    return any(
        isinstance(function, FunctionType) and _is_named(inspect.unwrap(function).__code__)
        for base in cls.__mro__
        for name, function in vars(base).items()
        if name != "__init__"
    )


def _is_named(code: CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return "layer_idx" in code.co_names or any(map(_is_named, inner))


def layer_idxs_beside(module: nn.Module, modules: Iterable[nn.Module]) -> frozenset[int]:
    """Returns places that some modules use, apart from those above or below a module.

    Args:
        module: module that is left out.
        modules: modules whose own places count; those of modules below them do not.
    """
    idxs: set[int] = set()
    below = set(module.modules())
    for other in modules:
        idx = _place_of(other)
        # A negative number means that the place is given in each call.
        if idx is not None and max(idx, ALL_PLACES) not in idxs and other not in below:
            if all(child is not module for child in other.modules()):
                idxs.add(max(idx, ALL_PLACES))
    return frozenset(idxs)


def _parts(cache: Any) -> list[Any]:
    nested = [getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross")]
    return [part for part in (cache, *nested) if part is not None]


def _layers(cache: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(getattr(p, "layers", ()) for p in _parts(cache)))
