"""A check that parameters which a plan leaves whole have the same gradient on all ranks.

A plan may omit that a parameter is applied to split activations. Its gradient is then a term of a
sum on each rank, and only this check finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.tensor_parallel import regions

# Tolerances of norms and sums, relative to the largest norm in the block. Common gradients differ
# only by the order of sums; terms of a sum differ by their own size.
_TOLERANCE = {torch.float16: 0.1, torch.bfloat16: 0.1}
_FLOOR = {torch.float16: 1e-2, torch.bfloat16: 1e-2}


class WholeGradients:
    """Checks the gradients of the whole parameters of one block.

    Args:
        named: names in the model and parameters whose gradients are to be equal.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = [(name, p) for name, p in named if p.requires_grad]
        self._seen: dict[str, Tensor] = {}
        self._hooks = [
            parameter.register_hook(_GradientStamp(self._seen, name))
            for name, parameter in self._named
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns no check: a copy of the model has other gradients, which are not checked."""
        return None

    def is_due(self) -> bool:
        """Returns whether a backward pass has run since, so that `run` has gradients."""
        return bool(self._seen)

    def run(self) -> None:
        """Compares the gradients of the first backward pass and ends the check. Collective.

        Raises:
            RuntimeError: on all ranks, if gradients of a parameter differ.
        """
        for hook in self._hooks:
            hook.remove()
        seen, self._seen = self._seen, {}
        like = next(iter(seen.values()))
        zero = like.new_zeros(2)
        own = torch.stack([seen.get(name, zero) for name, _ in self._named])
        with torch.no_grad():
            found = regions.gather(own[None], 0, grad="own")  # [ranks, parameters, 2]
        if not bool(found.isfinite().all()):
            return
        spread = (found.amax(0) - found.amin(0)).amax(-1)
        sizes = found.abs().amax((0, 2))
        for idx, (name, parameter) in enumerate(self._named):
            tolerance = _TOLERANCE.get(parameter.dtype, 1e-2)
            floor = _FLOOR.get(parameter.dtype, 1e-5) * float(sizes.max())
            if float(spread[idx]) > tolerance * max(float(sizes[idx]), floor):
                raise RuntimeError(
                    f"{_C.rank_prefix()}the gradients of '{name}' are not the same on all "
                    "tensor-parallel ranks: it is applied to what a plan splits, and the plan does "
                    "not say that its gradients are terms of a sum. Give it the word "
                    "'replicated_with_grad_allreduce' in a plan of your own, or leave what is "
                    "around it whole by smp.set_tensor_parallelism(module, False)"
                )


class _GradientStamp:
    """A hook that keeps norm and sum of the first gradient."""

    def __init__(self, seen: dict[str, Tensor], name: str) -> None:
        self._seen, self._name = seen, name

    def __call__(self, grad: Tensor) -> None:
        if self._name not in self._seen and not regions.is_alone() and not grad.is_meta:
            real = grad.detach().double()
            self._seen[self._name] = torch.stack([real.norm(), real.sum()])
