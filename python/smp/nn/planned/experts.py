"""Experts of which a rank holds some features, and modules that return a rank's term of a sum."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

import smp._C as _C
from smp.nn.layout import Layout
from smp.nn.module import DistributedModule
from smp.tensor_parallel import regions


class PlannedTerm(DistributedModule):
    """Precedes the class of a module whose results are terms of a sum over the ranks.

    Its inputs are common, and their gradients are summed over the ranks.

    Attributes:
        _smp_layout: layout of the model.
        _smp_name: name of the module in the model.
        _smp_inside: the module is in a block, where activations are common.
        _smp_word: word of the plan for the module.
    """

    is_indivisible = True

    _smp_word: str
    _smp_layout: Layout
    _smp_inside: bool

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Computes the sum of the terms. Collective over the tensor-parallel group."""
        has_own = self._smp_layout.has_own_batches and not self._smp_inside
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if has_own:
            self._check_tokens(tensors)

        def common(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            is_real = x.is_floating_point()
            if has_own:
                return regions.gather(x, 0, grad="sum" if is_real else "own")
            return regions.copy(x) if is_real else x

        kwargs = {key: common(x) for key, x in kwargs.items()}
        output = super().forward(*map(common, args), **kwargs)
        if not isinstance(output, Tensor):
            raise RuntimeError(
                f"{_C.rank_prefix()}{self._smp_name}: experts that a plan splits gave a "
                f"{type(output).__name__}; expected one tensor, which is summed over the ranks. "
                "Leave them out of the plan"
            )
        return regions.reduce_scatter(output, 0) if has_own else regions.reduce(output)

    def _check_tokens(self, tensors: list[Tensor]) -> None:
        """Raises ValueError unless the tokens of all ranks can be gathered."""
        is_routed = self._smp_word != "moe_tp_experts" or any(
            not x.is_floating_point() for x in tensors
        )
        if not (is_routed and _have_same_tokens(tensors)):
            raise ValueError(
                f"{_C.rank_prefix()}{self._smp_name}: experts that a plan splits got tensors of "
                f"shapes {[list(x.shape) for x in tensors]}; expected tokens and the numbers of "
                "their experts, with as many tokens along dim 0, or along the first two, in each: "
                "those of all ranks are gathered. With prescaled_batch all ranks have them"
            )


class PlannedIdentity(DistributedModule):
    """Precedes the class of a whole expert that returns its input: ``moe_identity_expert``."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Divides the input, so that the sum over the ranks is that of one expert."""
        return super().forward(x / regions.size(), *args, **kwargs)


def _have_same_tokens(tensors: list[Tensor]) -> bool:
    """Returns whether each tensor is ``[tokens, *]`` or ``[samples, tokens of each, *]``."""
    if not all(x.dim() for x in tensors):
        return False
    num = max(x.shape[0] for x in tensors)
    return all(num in (x.shape[0], math.prod(x.shape[:2])) for x in tensors)
