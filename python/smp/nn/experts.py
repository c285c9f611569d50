"""Experts on different ranks of a tensor-parallel group, and how tokens reach them.

A module whose experts are spread keeps its class's own code. That code is called with the tokens
sent to this rank and with the numbers of this rank's experts. See docs/design/experts.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.activations.recompute import recompute
from smp.nn.module import DistributedModule, class_in_front
from smp.tensor_parallel import regions, sharding, tokens

#: pairs of a token and an expert that are computed at a time, in multiples of a rank's average
PAIRS_AT_A_TIME = 2


@dataclass
class Spread:
    """A distribution of experts over ranks.

    Attributes:
        name: name of the module that calls the experts, for errors.
        sizes: numbers of experts, by rank.
        has_own_batches: the ranks hold different tokens; else all hold the same.
    """

    name: str
    sizes: tuple[int, ...]
    has_own_batches: bool

    @property
    def begin(self) -> int:
        """The first expert of this rank."""
        return sharding.begin_of(self.sizes)

    @property
    def num_own(self) -> int:
        return self.sizes[regions.rank()]


class HoldsExperts(DistributedModule):
    """A module that holds the parameters of this rank's experts."""

    _smp_spread: Spread

    def get_common_tokens(self) -> None:
        """Declares that all ranks call the experts with the same tokens."""
        self._smp_spread.has_own_batches = False


# ---- the dispatch of all forms

#: function of what came to this rank, ``[rows, *]`` each, and of the routes; returns ``[rows, *]``
Compute = Callable[[Sequence[Tensor], _C.TokenRoutes], Tensor]


def dispatch(
    spread: Spread, tensors: Sequence[Tensor], experts: Tensor, compute: Compute
) -> Tensor:
    """Sends tokens to the ranks of their experts, and returns what is computed there.

    Collective over the tensor-parallel group.

    Args:
        spread: distribution of the experts.
        tensors: tensors to send, ``[tokens, *]`` each; integers have no gradient.
        experts: int64 ``[tokens, k]``, numbers of experts of the whole layer.
        compute: function that runs this rank's experts.

    Returns:
        ``[tokens, *]``, for each token the sum over the ranks of its experts.
    """
    sizes = None if spread.has_own_batches else sharding.split(experts.shape[0])
    if sizes is not None:  # all ranks have these tokens: each sends some of them
        tensors = [_own_rows(x, sizes) for x in tensors]
        experts = _own_rows(experts, sizes)
    routes = tokens.route(experts, spread.sizes)
    y = tokens.combine(compute(tokens.dispatch(tensors, routes), routes), routes)
    return y if sizes is None else regions.gather(y, 0, sizes, grad="own")


def _own_rows(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns this rank's rows of a tensor that all ranks have."""
    if x.is_floating_point():
        return regions.scatter(x, 0, sizes)
    return x.narrow(0, sharding.begin_of(sizes), sizes[regions.rank()])


def pairs_at_a_time(routes: _C.TokenRoutes, num_choices: int) -> int:
    """Returns the number of pairs of a row and an expert beyond which they are computed in slices.

    Args:
        routes: routes of this rank's tokens.
        num_choices: experts of a token.
    """
    on_average = -(-routes.group_tokens * num_choices // len(routes.sent))
    return max(1, PAIRS_AT_A_TIME * on_average)


def run_slice(
    run: Callable[..., Any], args: tuple[Any, ...], num_slices: int, module: nn.Module
) -> Any:
    """Runs experts on one of several slices, which the backward pass computes again."""
    return run(*args) if num_slices == 1 else recompute(run, args, modules=(module,))


# ---- modules that get tokens, numbers of experts and weights


class SpreadExperts(HoldsExperts):
    """Precedes the class of a module whose experts are spread.

    That class takes tokens ``[tokens, H]``, numbers of experts ``[tokens, k]`` and their weights
    ``[tokens, k]``. It returns ``[tokens, H]``: for each token the weighted sum of its experts'
    results. Modules of this class do the same, with numbers of experts of the whole layer.
    Collective over the tensor-parallel group.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the same as the class that follows."""
        spread = self._smp_spread
        x, experts, weights = _arguments(super().forward, args, kwargs, spread.name)
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        experts, weights = (t.reshape(-1, t.shape[-1]) for t in (experts, weights))
        if not x.shape[0] == experts.shape[0] == weights.shape[0] or experts.shape != weights.shape:
            raise ValueError(
                f"{_C.rank_prefix()}'{spread.name}': expected as many experts and weights for each "
                f"token, got tokens of shape {list(x.shape)}, experts {list(experts.shape)} and "
                f"weights {list(weights.shape)}; leave the module whole by "
                "smp.set_tensor_parallelism(module, False)"
            )
        experts = experts.long()
        y = dispatch(spread, (x, weights, experts), experts, self._of_rows)
        return y.reshape(*shape[:-1], y.shape[-1])

    def _of_rows(self, came: Sequence[Tensor], routes: _C.TokenRoutes) -> Tensor:
        """Returns the results of the rows ``[rows, H]`` that are on this rank."""
        x, weights, experts = came
        spread, compute = self._smp_spread, super().forward
        result: Tensor
        if routes.was_alone:
            result = compute(x, experts % spread.num_own, weights)
            return result
        if routes.num_pairs == 0:
            # The graph continues, so that all ranks run the same backward; gradients are zeros.
            nothing, first = x.sum(0, keepdim=True), experts.new_zeros(1, 1)
            result = compute(nothing, first, weights.sum().reshape(1, 1))
            return result[:0]
        local = experts - spread.begin
        is_here = (local >= 0) & (local < spread.num_own)
        row, choice = torch.nonzero_static(is_here, size=routes.num_pairs).unbind(1)
        chosen, factor = local[row, choice].unsqueeze(1), weights[row, choice].unsqueeze(1)
        if routes.num_pairs == x.shape[0]:  # each row has one pair
            result = compute(x, chosen, factor)
            return result
        limit = pairs_at_a_time(routes, experts.shape[1])
        slices = list(zip(row.split(limit), chosen.split(limit), factor.split(limit), strict=True))
        total: Tensor | None = None
        for of in slices:
            result = run_slice(self._of_pairs, (x, *of), len(slices), self)
            if total is None:
                total = result.new_zeros(x.shape[0], result.shape[-1])
            total = total.index_add(0, of[0], result)
        assert total is not None
        return total

    def _of_pairs(self, x: Tensor, row: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """Returns the results ``[pairs, H]`` of rows and one expert each."""
        result: Tensor = super().forward(x.index_select(0, row), expert, weight)
        return result


def _arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the three arguments of a call, whatever their names are."""
    values = list(inspect.signature(forward).bind(*args, **kwargs).arguments.values())
    if len(values) != 3 or not all(isinstance(value, Tensor) for value in values):
        raise ValueError(
            f"{_C.rank_prefix()}'{name}': expected tokens, numbers of experts and weights, got "
            f"{', '.join(type(value).__name__ for value in values)}; leave the module whole by "
            "smp.set_tensor_parallelism(module, False)"
        )
    return values[0], values[1], values[2]


def spread_experts_of(module: nn.Module, how: Spread) -> None:
    """Makes a module compute with its experts spread; its parameters are those of this rank."""
    module.__class__ = class_in_front(SpreadExperts, type(module))
    module.__dict__["_smp_spread"] = how
    if "num_experts" in module.__dict__:
        module.__dict__["num_experts"] = how.num_own
