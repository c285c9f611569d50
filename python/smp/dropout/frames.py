"""Wraps the forward of each module that may drop, to track the place of the running code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.rnn import PackedSequence

from smp.dropout import places
from smp.dropout.masks import mixed
from smp.dropout.places import Place
from smp.modules.forwards import Forward, WrapperKind, wrap_forward

_DRAWING_LEAVES = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class _ModulePlace(NamedTuple):
    """Properties shared by all places of a module."""

    name: str
    key: int
    is_split: bool


_places: WeakKeyDictionary[nn.Module, _ModulePlace] = WeakKeyDictionary()


def stand_around(
    modules: Iterable[tuple[str, nn.Module]], model_idx: int, is_split: Callable[[nn.Module], bool]
) -> Callable[[], None]:
    """Wraps the forwards of a model so that they enter their places.

    Args:
        modules: modules of the model, by name; alike on all ranks.
        model_idx: number of the model.
        is_split: returns whether this rank has a part of the module's activations that only the
            module's own code can locate.

    Returns:
        a function that removes the wrappers.
    """
    undo = []
    for name, module in modules:
        if _draws_nothing(module):
            continue
        place = _ModulePlace(
            name or type(module).__name__, places.key_of(f"{model_idx}:{name}"), is_split(module)
        )
        _places[module] = place
        undo.append(wrap_forward(module, WrapperKind.PLACE, functools.partial(_around, module)))

    def take_away() -> None:
        for one in undo:
            one()

    return take_away


def key_of(module: nn.Module) -> int | None:
    """Returns the key of a module with a place, or None for a module that draws nothing."""
    place = _places.get(module)
    return None if place is None else place.key


@contextlib.contextmanager
def inside(module: nn.Module) -> Iterator[None]:
    """Runs the block as a call of the module, whose own forward does not run."""
    place = _enter(module, ())
    if place is None:
        yield
        return
    with places.at(place):
        yield


def _draws_nothing(module: nn.Module) -> bool:
    """Returns whether a module is PyTorch's own, has no children and never drops."""
    is_plain = type(module).__module__.startswith("torch.nn.modules.")
    has_none = next(module.children(), None) is None
    return is_plain and has_none and not isinstance(module, _DRAWING_LEAVES)


def _dim_inside(module: nn.Module, dim: int | None) -> int | None:
    """Returns the dim of tensors inside of a module along which samples lie."""
    if isinstance(module, nn.MultiheadAttention):
        return 0  # holds for attention weights, whatever the order of its arguments
    if isinstance(module, nn.RNNBase):
        return 1  # holds between its levels, whatever the order of its arguments
    if isinstance(module, _LAYERS) and isinstance(module.self_attn, nn.MultiheadAttention):
        return 0 if module.self_attn.batch_first else 1
    return dim


def _around(module: nn.Module, inner: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        place = _enter(module, args)
        if place is None:
            return inner(*args, **kwargs)
        token = places.enter(place)
        try:
            return inner(*args, **kwargs)
        finally:
            places.leave(token)

    return forward


def _enter(module: nn.Module, args: tuple[Any, ...]) -> Place | None:
    """Returns the place of a call that begins now, or None where masks are PyTorch's."""
    outside, own = places.current(), _places.get(module)
    if outside is None or own is None:
        return None
    place = Place(
        mixed(outside.key, own.key, outside.count_call(own.key)),
        outside.samples,
        own.name,
        _dim_inside(module, outside.dim),
        outside.split_by or (own.name if own.is_split else None),
        outside.of_group,
        outside.block,
    )
    if isinstance(module, nn.RNNBase):
        _check_recurrent(module, place, args)
    return place


def _check_recurrent(module: nn.RNNBase, place: Place, args: tuple[Any, ...]) -> None:
    """Refuses draws that bypass PyTorch's operators, and inputs whose rows are no samples."""
    if not (args and module.training and module.dropout > 0.0):
        return
    is_packed = isinstance(args[0], PackedSequence)
    x = args[0].data if is_packed else args[0]
    if is_packed or x.is_cuda:
        raise place.refused(
            x,
            "rows of a packed sequence are no samples"
            if is_packed
            else "recurrent layers draw their masks inside of cuDNN on a GPU",
            "set its dropout to 0, and put nn.Dropout between layers of one level each",
        )
