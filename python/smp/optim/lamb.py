"""LAMB."""

from __future__ import annotations

import torch
from torch import Tensor

from smp.optim.fused import Batch, FusedOptimizer, Params


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam with steps whose length is proportional to the length of the parameter.

    Gradients are first divided by ``norm / max_grad_norm`` if their norm, over all groups, is
    larger than ``max_grad_norm``. Then ``p -= lr * |p| / |u| * u`` with the update ``u`` of Adam.
    Parameters without weight decay change by ``lr * u`` unless ``use_nvlamb``. State of a
    parameter: ``step``, ``exp_avg``, ``exp_avg_sq``.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a number or a tensor with one.
        bias_correction: whether to divide the moments by ``1 - beta ** step``.
        betas: decay rates of the averages of gradients and of their squares.
        eps: number that is added to the root of the second moment.
        weight_decay: factor of the decay.
        amsgrad: False; the variant is not supported.
        adam_w_mode: whether weights decay beside the moments; else the decay is added to gradients.
        grad_averaging: whether gradients enter the first moment times ``1 - beta1``.
        set_grad_none: default of :meth:`zero_grad`.
        max_grad_norm: largest norm that is not clipped, one for all groups; None or 0: any.
        use_nvlamb: whether lengths count for parameters without weight decay, too.

    Source: You et al. 2020. Arguments and the order of the two norms: FusedLAMB of NVIDIA apex.
    """

    _num_norms = 2

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"FusedLAMB: max_grad_norm must be >= 0, got {max_grad_norm!r}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults, set_grad_none)

    @property
    def wants_grad_norm(self) -> bool:
        """True if gradients are clipped to ``max_grad_norm``."""
        return bool(self.defaults["max_grad_norm"])

    def _update(self, batches: list[Batch]) -> None:
        divisor = self._divisor(batches)
        sums = [
            torch.ops.smp.fused_lamb_moments_(
                batch.params,
                batch.grads,
                batch.exp_avgs,
                batch.exp_avg_sqs,
                batch.steps,
                *batch.adam_options,
                batch.group["grad_averaging"],
                divisor,
                self._found_inf,
            )
            for batch in batches
        ]
        for batch, squares in zip(batches, self._over_ranks(batches, sums), strict=True):
            torch.ops.smp.fused_lamb_apply_(
                batch.params,
                batch.exp_avgs,
                batch.exp_avg_sqs,
                batch.steps,
                batch.copies,
                squares,
                self._lr(batch),
                *batch.adam_options,
                batch.group["use_nvlamb"],
                self._found_inf,
            )

    def _divisor(self, batches: list[Batch]) -> Tensor | None:
        """Returns the divisor of gradients: the loss scale, times their norm if it is too large."""
        if not self.wants_grad_norm or not batches:
            return self._grad_scale
        if self.grad_norm is not None:
            squares = self.grad_norm.double().reshape(()).square()
        else:
            parts = [torch.ops.smp.sum_of_squares(batch.grads) for batch in batches]
            squares = torch.stack([part.to(batches[0].device) for part in parts]).sum()
        divisor: Tensor = torch.ops.smp.clip_divisor(
            squares, self.defaults["max_grad_norm"], self._grad_scale, 0.0
        )[0]
        return divisor
