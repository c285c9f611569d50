"""Adam and AdamW."""

from __future__ import annotations

import torch
from torch import Tensor

from smp.optim.fused import Batch, FusedOptimizer, Params


class FusedAdam(FusedOptimizer):
    """Adam with decoupled weight decay (AdamW), or plain Adam.

    Results equal those of ``torch.optim.AdamW``, or of ``torch.optim.Adam`` without
    ``adam_w_mode``, and each loads state dicts of the other. State of a parameter: ``step``,
    ``exp_avg``, ``exp_avg_sq``.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a number or a tensor with one.
        bias_correction: whether to divide the moments by ``1 - beta ** step``.
        betas: decay rates of the averages of gradients and of their squares.
        eps: number that is added to the root of the second moment.
        adam_w_mode: whether weights decay beside the moments; else the decay is added to gradients.
        weight_decay: factor of the decay.
        amsgrad: False; the variant is not supported.
        set_grad_none: default of :meth:`zero_grad`.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019. Arguments: FusedAdam of NVIDIA apex.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "adam_w_mode": adam_w_mode,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, set_grad_none)

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            torch.ops.smp.fused_adam_(
                *batch.lists,
                self._lr(batch),
                *batch.adam_options,
                self._grad_scale,
                self._found_inf,
            )
