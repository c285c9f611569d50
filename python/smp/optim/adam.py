"""Adam and AdamW."""

from __future__ import annotations

import torch
from torch import Tensor

from smp.optim.fused import Batch, FusedOptimizer, Params


class FusedAdam(FusedOptimizer):
    """Adam, with decoupled weight decay (AdamW) unless told otherwise.

    Numbers are those of ``torch.optim.AdamW``, or ``torch.optim.Adam`` without ``adam_w_mode``, and
    state dicts go from one to the other. State of a parameter: ``step``, ``exp_avg``,
    ``exp_avg_sq``.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a number or a tensor with one.
        bias_correction: divide the moments by ``1 - beta ** step``.
        betas: of the averages of gradients and of their squares.
        eps: added to the root of the second moment.
        adam_w_mode: weight decay beside the moments; else it is added to the gradients.
        weight_decay: factor of the decay.
        amsgrad: must be False.
        set_grad_none: what :meth:`zero_grad` does by default.

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
