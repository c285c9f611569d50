"""Factors of gradients where a backward begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import smp._C as _C
from smp.model.backward_roots import is_zero
from smp.model.share import current_share
from smp.precision import LossScaler
from smp.world import runtime


class LossWeight:
    """The loss scale, and the shares of microbatches in the loss of the global batch.

    Args:
        current: the runtime.
        is_hooked: returns whether a communication hook averages gradients.

    Attributes:
        scaler: decides on the loss scale; None: there is none.
    """

    def __init__(self, current: runtime.Runtime, is_hooked: Callable[[], bool]) -> None:
        self._current = current
        self._is_hooked = is_hooked
        self.scaler: LossScaler | None = None

    # ---- loss scale

    @property
    def scale(self) -> float:
        """Factor of a loss before its backward, read on the host."""
        return 1.0 if self.scaler is None else self.scaler.loss_scale

    def watch_backward(self, output: Any) -> None:
        """Refuses a backward without the loss scale that does not begin in this library."""
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

    # ---- where a backward begins

    def at_root(self) -> float | torch.Tensor:
        """Returns the factor of gradients where a backward begins.

        Inside of a step function this is the share of the running microbatch in the loss of the
        global batch. With a communication hook, which averages by itself, it is the weight of the
        microbatch relative to the others. The loss scale is a further factor.

        Returns:
            a number; with a dynamic loss scale a float64 scalar tensor on the device.
        """
        share = current_share()
        factor = 1.0
        if share is not None:
            factor = share.weight if self._is_hooked() else share.of_loss
        if self.scaler is None or factor == 0.0:
            return factor
        return self.scaler.factor * factor

    def skips(self, factor: float | torch.Tensor) -> bool:
        """Returns whether a microbatch of weight 0 has no backward.

        The backward is not skipped if other ranks take part in it (split layers, sharding).
        """
        sizes = self._current.rank.sizes
        return is_zero(factor) and sizes["tp"] == 1 and sizes["shard"] == 1
