"""``smp.amp``: automatic mixed precision when a gradient may overflow on another rank."""

from __future__ import annotations

import torch
from torch import Tensor

from smp.model.torch_training.grad_scaler import agreed
from smp.world import runtime

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for models of which each rank has a part.

    All ranks of a replica decide together whether gradients are infinite or NaN, so that they skip
    the same steps and agree on the scale. ``unscale_`` and ``step`` are collective over them
    (the MP group; all ranks if the optimizer state is sharded). The host waits for the device only
    where PyTorch's scaler does: in ``step`` of optimizers that are not fused. Autocast is PyTorch's
    own. While models are wrapped, PyTorch's scaler does the same for optimizers of their
    parameters.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: arguments of PyTorch's
            scaler.
    """

    agrees_itself = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._rank = runtime.current().rank
        super().__init__(
            self._rank.device.type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return agreed(self._rank, found, found_inf)
