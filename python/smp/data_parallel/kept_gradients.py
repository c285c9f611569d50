"""Gradients that nobody but the library changes while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C

# Of a tensor itself: parameters in 16 bits show that of their master.
_native: Any = torch.Tensor.grad


class KeptGradients:
    """Notices that code of a step function, or of the model, assigned ``.grad``.

    Gradients of a step are the library's until it is over: those of all microbatches are averaged
    then, and summed over replicas. What is assigned meanwhile would be of one microbatch, and what
    is dropped would be those of the microbatches before.

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
        """Notes the gradients that there are."""
        self._before = [_native.__get__(tensor) for _, tensor in self._watched]

    def check(self) -> None:
        """Raises a RuntimeError that names a parameter whose gradient is another one since."""
        noted, self._before = self._before, []  # else they would live on
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
        """The step has failed."""
        self._before = []
