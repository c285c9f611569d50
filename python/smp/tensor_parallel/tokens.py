"""Tokens that go to the ranks of a tensor-parallel group where their experts are, and come back.

Like the functions of `regions` these work on the group of the running `smp.init` and are collective
over it, forward and backward, also for ranks without tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import smp._C as _C
from smp.tensor_parallel.regions import _group


def route(experts: Tensor, sizes: Sequence[int]) -> _C.TokenRoutes:
    """Finds out which tokens go where. The hosts exchange how many, and wait for a device once.

    Args:
        experts: int64 [tokens, k], numbers of experts of the whole layer; tokens may be none.
        sizes: experts of each rank, in their order.

    Raises:
        ValueError: numbers of experts that no rank has; ranks that disagree on sizes or k.
    """
    return _group().route(experts, list(sizes))


def dispatch(tensors: Sequence[Tensor], routes: _C.TokenRoutes) -> list[Tensor]:
    """Rows of tokens on the ranks of their experts, once on each, however many are there.

    Args:
        tensors: [tokens, *] each; integers have no gradient.
        routes: of the tokens.

    Returns:
        [rows, *] each, in the order of the ranks that they come from.
    """
    return _group().dispatch(list(tensors), routes)


def combine(rows: Tensor, routes: _C.TokenRoutes) -> Tensor:
    """The sums [tokens, *] of the results [rows, *] of each token, on the rank that it is of."""
    return _group().combine(rows, routes)
