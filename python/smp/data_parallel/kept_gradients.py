"""Checks that only the library changes gradients while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C

# The attribute of a plain tensor: 16-bit parameters show their master's gradient instead.
_native: Any = torch.Tensor.grad


class KeptGradients:
    """Notices that code of a step function, or of the model, assigned ``.grad``.

    The library owns gradients until the step is over: it averages them over all microbatches, and
    sums them over replicas. An assigned gradient would cover one microbatch only, and a dropped one
    would lose earlier microbatches.

    Args:
        parameters: names in the whole model, and trainable parameters of this rank.
        target_of: the tensor whose ``.grad`` gets the gradient of a parameter.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        target_of: Callable[[nn.Parameter], Tensor],
    ) -> None:
        self._watched = [
            (name, tensor)
            for name, parameter in parameters
            for tensor in {id(t): t for t in (parameter, target_of(parameter))}.values()
        ]
        self._before: list[Tensor | None] = []

    def begin_step(self) -> None:
        """Notes the present gradients."""
        self._before = [_native.__get__(tensor) for _, tensor in self._watched]

    def check(self) -> None:
        """Raises a RuntimeError if a parameter's gradient is another tensor than before."""
        noted, self._before = self._before, []  # frees the noted gradients
        for (name, tensor), before in zip(self._watched, noted, strict=False):
            if _native.__get__(tensor) is not before:
                raise RuntimeError(
                    f"{_C.rank_prefix()}.grad of '{name}' was assigned, or dropped, inside of a "
                    "step. A step function runs once per microbatch, and gradients are averaged "
                    "over these and summed over replicas when it has returned: reset them before "
                    "it, and change them after it. Gradients of torch.autograd.grad are those of "
                    "one microbatch of this rank; use model.backward(loss)"
                )

    def forget(self) -> None:
        """Forgets the noted gradients of a step that failed."""
        self._before = []
