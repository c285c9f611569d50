"""Mixtures of experts whose experts are on different ranks of a tensor-parallel group.

Such a module keeps its class's own code. That code is called with the tokens sent to this rank and
with the numbers of this rank's experts. See docs/design/experts.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.activations.recompute import recompute
from smp.nn.module import DistributedModule
from smp.tensor_parallel import regions, sharding, tokens

#: pairs of a token and an expert that are computed at a time, in multiples of a rank's average
PAIRS_AT_A_TIME = 2


@dataclass(frozen=True)
class Spread:
    """A distribution of a module's experts over ranks.

    Attributes:
        name: name of the module in the model, for errors.
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

    def get_common_tokens(self) -> None:
        """Declares that all ranks call the experts with the same tokens."""
        raise NotImplementedError


class SpreadExperts(HoldsExperts):
    """Precedes the class of a module whose experts are spread.

    That class takes tokens ``[tokens, H]``, numbers of experts ``[tokens, k]`` and their weights
    ``[tokens, k]``. It returns ``[tokens, H]``: for each token the weighted sum of its experts'
    results. Modules of this class do the same, with numbers of experts of the whole layer.
    Collective over the tensor-parallel group.
    """

    _smp_spread: Spread

    def get_common_tokens(self) -> None:
        self.__dict__["_smp_spread"] = replace(self._smp_spread, has_own_batches=False)

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
        if spread.has_own_batches:
            y = self._of_own_tokens(x, experts, weights)
        else:
            # All ranks have these tokens: each sends some of them.
            sizes = sharding.split(x.shape[0])
            begin, own = sharding.begin_of(sizes), sizes[regions.rank()]
            y = self._of_own_tokens(
                regions.scatter(x, 0, sizes),
                experts.narrow(0, begin, own),
                regions.scatter(weights, 0, sizes),
            )
            y = regions.gather(y, 0, sizes, grad="own")
        return y.reshape(*shape[:-1], y.shape[-1])

    def _of_own_tokens(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        routes = tokens.route(experts.long(), self._smp_spread.sizes)
        rows, factors, chosen = tokens.dispatch((x, weights, experts.long()), routes)
        return tokens.combine(self._of_rows(rows, factors, chosen, routes), routes)

    def _of_rows(
        self, x: Tensor, weights: Tensor, experts: Tensor, routes: _C.TokenRoutes
    ) -> Tensor:
        """Returns the results of the rows ``[rows, H]`` that are on this rank."""
        spread = self._smp_spread
        compute = super().forward
        if routes.was_alone:
            result: Tensor = compute(x, experts % spread.num_own, weights)
            return result
        if routes.num_pairs == 0:
            # The graph continues, so that all ranks run the same backward; gradients are zeros.
            nothing = x.sum(0, keepdim=True)
            first = experts.new_zeros(1, 1)
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
        if routes.num_pairs <= limit:
            return _sum_up(x, [(row, self._of_pairs(x, row, chosen, factor))])
        slices = zip(row.split(limit), chosen.split(limit), factor.split(limit), strict=True)
        return _sum_up(
            x,
            ((of[0], recompute(self._of_pairs, (x, *of), modules=(self,))) for of in slices),
        )

    def _of_pairs(self, x: Tensor, row: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """Returns the results ``[pairs, H]`` of rows and one expert each."""
        result: Tensor = super().forward(x.index_select(0, row), expert, weight)
        return result


def pairs_at_a_time(routes: _C.TokenRoutes, num_choices: int) -> int:
    """Returns the number of pairs of a row and an expert beyond which they are computed in slices.

    The backward pass computes slices again.

    Args:
        routes: routes of this rank's tokens.
        num_choices: experts of a token.
    """
    on_average = -(-routes.group_tokens * num_choices // len(routes.sent))
    return max(1, PAIRS_AT_A_TIME * on_average)


def _sum_up(x: Tensor, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Adds up results of rows of ``x``; each part is numbers of rows and their results."""
    total: Tensor | None = None
    for row, result in parts:
        if total is None:
            total = result.new_zeros(x.shape[0], result.shape[-1])
        total = total.index_add(0, row, result)
    assert total is not None
    return total


def _arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the first three arguments of a call, whatever their names are."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    values = list(bound.arguments.values())
    if len(values) != 3 or not all(isinstance(value, Tensor) for value in values):
        raise ValueError(
            f"{_C.rank_prefix()}'{name}': expected tokens, numbers of experts and weights, got "
            f"{', '.join(type(value).__name__ for value in values)}; leave the module whole by "
            "smp.set_tensor_parallelism(module, False)"
        )
    return values[0], values[1], values[2]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def spread_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of modules of a class whose experts are spread."""
    if cls not in _classes:
        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _classes[cls] = type(cls.__name__, (SpreadExperts, cls), members)
    return _classes[cls]


def spread(module: nn.Module, how: Spread) -> None:
    """Makes a module compute with its experts spread; its parameters are those of this rank."""
    module.__class__ = spread_class(type(module))
    module.__dict__["_smp_spread"] = how
    if "num_experts" in module.__dict__:
        module.__dict__["num_experts"] = how.num_own
