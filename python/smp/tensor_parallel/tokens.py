"""Sends tokens to the ranks of a tensor-parallel group where their experts are, and back.

Like the functions of `regions` these work on the group of the running `smp.init` and are collective
over it, forward and backward, also for ranks without tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import smp._C as _C
from smp.tensor_parallel.regions import _group


def route(experts: Tensor, sizes: Sequence[int]) -> _C.TokenRoutes:
    """Finds the destinations of tokens. The hosts exchange counts, and wait for a device once.

    Args:
        experts: int64 [tokens, k], numbers of experts of the whole layer; there may be no tokens.
        sizes: number of experts of each rank, in the order of the ranks.

    Raises:
        ValueError: no rank has an expert of some number, or ranks disagree on sizes or k.
    """
    return _group().route(experts, list(sizes))


def dispatch(tensors: Sequence[Tensor], routes: _C.TokenRoutes) -> list[Tensor]:
    """Sends rows of tokens to the ranks of their experts, once to each, however many it has.

    Args:
        tensors: [tokens, *] each; integers have no gradient.
        routes: routes of the tokens.

    Returns:
        [rows, *] each, in the order of the ranks that sent them.
    """
    return _group().dispatch(list(tensors), routes)


def combine(rows: Tensor, routes: _C.TokenRoutes) -> Tensor:
    """Returns the sums [tokens, *] of each token's results [rows, *], on the token's rank."""
    return _group().combine(rows, routes)
