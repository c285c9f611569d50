"""Borders between whole sequences and parts of them, and between parts of sequences and of heads.

Each function is collective over the context-parallel group: its ranks call the same functions in
one order, forward and backward. The backward of each is its exact transpose. So where all ranks
begin a backward with their own loss, each parameter's gradient is a term of the derivative of the
sum of all losses, whether ranks compute something alike or in parts; the mean over the ranks, which
replicas take anyway, is the derivative of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import smp._C as _C
from smp.context_parallel.parts import Interval, even_parts
from smp.world import runtime

_P = ParamSpec("_P")


def _of_data(region: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Makes a region accept handles of tensors on other pipeline ranks."""

    @wraps(region)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        tensors = (*args, *kwargs.values())
        if has_torch_function(tensors):
            result: Any = handle_torch_function(call, tensors, *args, **kwargs)
            return result  # type: ignore[no-any-return]
        return region(*args, **kwargs)

    return call


def group() -> _C.TensorParallelGroup:
    """Returns the context-parallel group of this rank."""
    return runtime.current().rank.comms.cp_group


def own(extent: int) -> Interval:
    """Returns this rank's part of a dim."""
    ranks = group()
    return Interval.of_rank(even_parts(extent, ranks.size), ranks.group_rank)


def sizes_of(extent: int) -> list[int]:
    """Returns the sizes of the parts of all ranks."""
    return even_parts(extent, group().size)


def cut(x: Tensor, dim: int) -> Tensor:
    """Returns a copy of this rank's part of a tensor that all ranks have.

    Backward: zeros for the parts of others. Communicates nothing.
    """
    return own(x.shape[dim]).of(x, dim).clone(memory_format=torch.contiguous_format)


@_of_data
def gather(part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenates the parts of all ranks; backward: the sum over the ranks, of it the own part.

    Args:
        part: part of this rank.
        dim: dim of the concatenation.
        sizes: sizes of the parts along the dim.
    """
    return group().gather(part, dim, list(sizes), True)


@_of_data
def sum_of_parts(x: Tensor) -> Tensor:
    """Returns the sum over the ranks; backward: the sum of the gradients, too."""
    ranks = group()
    return ranks.copy(ranks.reduce(x))


@_of_data
def to_heads(x: Tensor, length: int, heads: Sequence[int]) -> Tensor:
    """Exchanges a part of the tokens of all heads for all tokens of some heads.

    Args:
        x: ``[B, heads, part of the tokens, D]``.
        length: number of tokens of all ranks.
        heads: numbers of heads of each rank.

    Returns:
        ``[B, heads of this rank, length, D]``. Backward: the inverse.
    """
    ranks = group()
    return ranks.exchange(x, 1, 2, list(heads), even_parts(length, ranks.size))


@_of_data
def to_tokens(x: Tensor, tokens_dim: int, heads_dim: int, heads: Sequence[int]) -> Tensor:
    """Exchanges all tokens of some heads for a part of the tokens of all heads.

    Args:
        x: tokens of all ranks along ``tokens_dim``, heads of this rank along ``heads_dim``.
        tokens_dim, heads_dim: dims.
        heads: numbers of heads of each rank.
    """
    ranks = group()
    sizes = even_parts(x.shape[tokens_dim], ranks.size)
    return ranks.exchange(x, tokens_dim, heads_dim, sizes, list(heads))


def all_say(says: bool, what: str) -> bool:
    """Returns whether all ranks pass True. Only hosts communicate."""
    return group().all_say(says, what)


def first_text(text: str | None, device: torch.device) -> str:
    """Returns the text of the first rank that has one. Collective; a rank must have one.

    Args:
        text: text of this rank, of which up to 250 bytes are sent; or None.
        device: device of tensors of this group.
    """
    codes = list((text or "").encode()[:_MOST_BYTES].ljust(_MOST_BYTES, b"\0"))
    rows = _rows(codes, device)
    texts = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]
    return next(text for text in texts if text)


def largest(numbers: Sequence[int], device: torch.device) -> list[int]:
    """Returns the largest of each number over the ranks. Collective.

    Args:
        numbers: equally many on each rank, below 2^24.
        device: device of tensors of this group.
    """
    return [max(column) for column in zip(*_rows(numbers, device), strict=True)]


def _rows(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Returns the numbers of all ranks."""
    part = torch.tensor([list(numbers)], dtype=torch.float32, device=device)
    every = gather(part, 0, [1] * group().size)
    return [[int(number) for number in row] for row in every.tolist()]


_MOST_BYTES = 250
