"""What gradients are multiplied with where a backward begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

import smp._C as _C
from smp.precision import LossScaler
from smp.world import runtime


class LossWeight:
    """The loss scale, and the shares that microbatches of different sizes have in a mean.

    Args:
        current: the runtime.
        averages: gradients are divided by the number of microbatches.

    Attributes:
        scaler: decides on the loss scale; None: there is none.
    """

    def __init__(self, current: runtime.Runtime, *, averages: bool) -> None:
        self._current = current
        self._averages = averages
        self.scaler: LossScaler | None = None
        self._weights: Sequence[float] | None = None
        self._weight = 1.0
        self._hooks: list[RemovableHandle] = []

    # ---- loss scale

    @property
    def scale(self) -> float:
        """What a loss is multiplied with before its backward; the host reads it."""
        return 1.0 if self.scaler is None else self.scaler.loss_scale

    def watch_backward(self, output: Any) -> None:
        """Refuses backward without a loss scale, where it may be called without this library."""
        scaler = self.scaler
        if scaler is None or not torch.is_grad_enabled():
            return
        if not scaler.is_dynamic and scaler.loss_scale == 1.0:
            return
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._check_scaled)

    def _check_scaled(self, grad: torch.Tensor) -> None:
        if self._current.steps.num_scaled_backwards == 0 and self.scale != 1.0:
            raise RuntimeError(
                f"{_C.rank_prefix()}backward began at a loss without its scale {self.scale:g},"
                " which would make gradients in torch.float16 vanish; call model.backward(loss) "
                "instead of loss.backward()"
            )

    # ---- weights of microbatches

    def at_root(self, weight: float, *, shares: bool) -> float | torch.Tensor:
        """What gradients of a microbatch are multiplied with where its backward begins.

        Args:
            weight: of the microbatch in the mean over the batch.
            shares: the weight counts here; without a pipeline it counts at the parameters.

        Returns:
            a number; with a dynamic loss scale a float64 tensor without dimensions on the device.
        """
        shared = weight if self._averages and shares else 1.0
        return shared if self.scaler is None else self.scaler.factor * shared

    def begin_step(self, weights: Sequence[float] | None, trained: Sequence[nn.Parameter]) -> None:
        """Scales the gradients of a step by the weight of their microbatch.

        At the parameters, because without a pipeline backward may be called without this library.

        Args:
            weights: of the microbatches; None if all are 1.
            trained: parameters whose gradients count.
        """
        if weights is None or not self._averages:
            return
        self._weights = weights
        self._hooks = [p.register_hook(lambda grad: grad * self._weight) for p in trained]

    def begin_microbatch(self, mb: int) -> None:
        if self._weights is not None:
            self._weight = self._weights[mb]

    def end_step(self) -> None:
        """Also of a step that has failed."""
        for handle in self._hooks:
            handle.remove()
        self._weights, self._weight, self._hooks = None, 1.0, []
