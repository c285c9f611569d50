"""Decides which part of sequences and of heads each rank has. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def even_parts(extent: int, num_ranks: int) -> list[int]:
    """Returns the sizes of the ranks' parts, which differ by one at the most.

    Args:
        extent: positions or heads of all ranks.
        num_ranks: number of parts.
    """
    size, rest = divmod(extent, num_ranks)
    return [size + (rank < rest) for rank in range(num_ranks)]


@dataclass(frozen=True)
class Interval:
    """A part of a dim.

    Attributes:
        begin: first index.
        size: number of indices.
    """

    begin: int
    size: int

    @staticmethod
    def of_rank(sizes: Sequence[int], rank: int) -> Interval:
        return Interval(sum(sizes[:rank]), sizes[rank])

    def of(self, x: Tensor, dim: int) -> Tensor:
        """Returns this part of a tensor, a view."""
        return x.narrow(dim, self.begin, self.size)


@dataclass(frozen=True)
class Heads:
    """Shares of attention heads.

    Attributes:
        queries: numbers of query heads of each rank.
        keys: numbers of key and value heads of each rank, after they were repeated.
        repeats: number of copies of each head of keys and values that are sent, one after the
            other.
    """

    queries: list[int]
    keys: list[int]
    repeats: int


def share_heads(num_queries: int, num_keys: int, num_ranks: int) -> Heads | None:
    """Shares heads so that each rank has the keys of its queries.

    Head i of the queries reads head ``i // (num_queries // num_keys)`` of keys and values. Where
    there are fewer of these than ranks, each is repeated as often as needed.

    Args:
        num_queries: number of query heads.
        num_keys: number of key and value heads.
        num_ranks: number of ranks.

    Returns:
        the shares; None if a rank would get no head or if ranks cannot have equal groups.
    """
    if num_queries < num_ranks or num_queries % num_keys != 0:
        return None
    group = num_queries // num_keys
    for repeats in (r for r in range(1, group + 1) if group % r == 0):
        if num_keys * repeats >= num_ranks:
            keys = even_parts(num_keys * repeats, num_ranks)
            return Heads([size * (group // repeats) for size in keys], keys, repeats)
    return None


def walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in arguments and the containers among them, with names."""
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) in (tuple, list):
        for idx, item in enumerate(value):
            yield from walk(item, f"{name}[{idx}]")
    elif type(value) is dict:
        for key, item in value.items():
            yield from walk(item, f"{name}.{key}" if name else str(key))


def mapped(value: Any, name: str, function: Any) -> Any:
    """Returns a value with ``function(name, tensor)`` instead of the tensors that `walk` yields.

    Containers in which nothing changes are the same objects.
    """
    if isinstance(value, Tensor):
        return function(name, value)
    if type(value) in (tuple, list):
        items = [mapped(item, f"{name}[{idx}]", function) for idx, item in enumerate(value)]
        is_same = all(a is b for a, b in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    if type(value) is dict:
        made = {
            key: mapped(item, f"{name}.{key}" if name else str(key), function)
            for key, item in value.items()
        }
        return value if all(made[key] is item for key, item in value.items()) else made
    return value


def activations_in(arguments: Mapping[str, Any]) -> str | None:
    """Returns the name of the argument with a block's activations, ``[B, S, features]``.

    It is ``hidden_states``, or else the first tensor of floating-point numbers with three dims.
    """
    named = [item for name, value in arguments.items() for item in walk(value, name)]
    known = [name for name, x in named if name == "hidden_states" and _may_be_activations(x)]
    return next(iter(known + [name for name, x in named if _may_be_activations(x)]), None)


def _may_be_activations(x: Tensor) -> bool:
    return x.dim() == 3 and x.is_floating_point()


def token_dim(name: str, x: Tensor, length: int) -> int | None:
    """Returns the dim of an argument along which it has one entry for each token of a part.

    Masks are none of these: attention reads them for all tokens. Whether the choice was right is
    seen by a trial of the block.

    Args:
        name: name of the argument.
        x: tensor.
        length: number of tokens of the whole sequence.

    Returns:
        dim; None if all ranks need the whole tensor.
    """
    dims = [dim for dim in range(x.dim()) if x.shape[dim] == length]
    if not dims or is_mask(name, x, length):
        return None
    ndim = x.dim()
    features_last = x.is_floating_point() and ndim >= 2
    order = [ndim - 2, ndim - 1] if features_last else [ndim - 1, ndim - 2]
    return next((dim for dim in [*order, *dims] if dim in dims), None)


def is_mask(name: str, x: Tensor, length: int) -> bool:
    """Returns whether an argument is a mask of attention, for all ranks to have as a whole."""
    if "mask" in name.lower() or x.dtype is torch.bool:
        return True
    has_pairs = x.dim() >= 3 and x.shape[-1] == x.shape[-2] == length
    if not x.is_floating_point():
        return has_pairs
    return x.dim() > 3 and x.shape[-1] == length and x.shape[-2] in (1, length)
