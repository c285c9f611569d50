"""NovoGrad."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smp.optim.fused import Batch, FusedOptimizer, Params, betas_of


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: momentum of gradients that are divided by a running norm, one per parameter.

    State of a parameter: ``step``, ``exp_avg``, and ``exp_avg_sq``, which is the running norm: one
    number and not a square.

    Args:
        params: parameters or groups of them.
        lr: learning rate; a number or a tensor with one.
        bias_correction: whether to divide the moment by ``1 - beta1 ** step`` and the norm by
            ``sqrt(1 - beta2 ** step)``.
        betas: decay rates of the averages of gradients and of norms.
        eps: number that is added to the norm.
        weight_decay: factor of the decay.
        amsgrad: False; the variant is not supported.
        reg_inside_moment: whether the normalised gradient and weight decay enter the moment; else
            the moment has plain gradients, and is normalised and decayed afterwards.
        grad_averaging: whether gradients enter the moment times ``1 - beta1``.
        norm_type: 2, or 0 (also ``math.inf``) for the largest absolute value.
        init_zero: whether the running norm starts at 0; else it starts at the first norm.
        set_grad_none: default of :meth:`zero_grad`.

    Source: Ginsburg et al. 2019. Arguments and their meaning: FusedNovoGrad of NVIDIA apex.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2, math.inf):
            raise ValueError(f"FusedNovoGrad: norm_type must be 2, 0 or inf, got {norm_type!r}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)

    def _new_moments(self, param: Tensor) -> dict[str, Tensor]:
        norm = torch.zeros((), dtype=param.dtype, device=param.device)
        return {**super()._new_moments(param), "exp_avg_sq": norm}

    def _update(self, batches: list[Batch]) -> None:
        is_max = self.defaults["norm_type"] != 2
        reduce = torch.ops.smp.max_abs if is_max else torch.ops.smp.sums_of_squares
        norms = [reduce(batch.grads)[None] for batch in batches]
        for batch, norm in zip(batches, self._over_ranks(batches, norms, is_max), strict=True):
            group = batch.group
            torch.ops.smp.fused_novograd_(
                *batch.lists,
                norm[0] if is_max else norm[0].sqrt(),
                self._lr(batch),
                *betas_of(group),
                group["eps"],
                group["weight_decay"],
                group["reg_inside_moment"],
                group["bias_correction"],
                group["grad_averaging"],
                is_max,
                group["init_zero"],
                self._grad_scale,
                self._found_inf,
            )
