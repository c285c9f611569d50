"""Updates by optimizers that divide gradients by themselves: torch's fused ones and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smp import comm, grad_norm, precision, runtime
from smp.data_parallel import model_parameter_of
from smp.optimizers.fused import FusedOptimizer
from smp.tensor_parallel.sharding import interval_of


def divides(optimizer: torch.optim.Optimizer) -> bool:
    """Does it divide gradients while it reads them? Torch's convention for fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def writes_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Does it write ``_smp_copy`` of what it updates?"""
    return isinstance(optimizer, FusedOptimizer)


def step_fused(
    optimizer: torch.optim.Optimizer,
    divisor: float,
    *,
    has_local: bool = True,
    given_scale: Tensor | None = None,
    given_found_inf: Tensor | None = None,
) -> Any:
    """One update with divided gradients.

    Collective over the ranks that hold parts of the same parameters, and over those of a replica,
    if the optimizer needs norms of whole gradients.

    Args:
        optimizer: one that `divides`.
        divisor: of the gradients.
        has_local: there is something to update on this rank.
        given_scale: a further divisor, or None.
        given_found_inf: where not 0, nothing changes; or None.

    Returns:
        what the optimizer returns.
    """
    target: Any = optimizer
    parameters = precision.parameters_of(optimizer)
    device = runtime.current().device
    if divisor != 1.0:
        own = torch.tensor(divisor, dtype=torch.float32, device=device)
        given_scale = own if given_scale is None else given_scale * own
    target.grad_scale, target.found_inf = given_scale, given_found_inf
    is_ours = isinstance(optimizer, FusedOptimizer)
    if is_ours:
        target.sum_norms = _sum_norms if _are_spread() else None
        if target.wants_grad_norm and (_are_spread() or comm.mp_size() > 1):
            total = grad_norm.global_norm(parameters).total
            target.grad_norm = torch.tensor(total, dtype=torch.float64, device=device)
    try:
        return optimizer.step() if has_local else None
    finally:
        del target.grad_scale, target.found_inf
        if is_ours:
            target.sum_norms = target.grad_norm = None


def _are_spread() -> bool:
    """May elements of one parameter be on several ranks?"""
    sizes = runtime.current().sizes
    return sizes["shard"] > 1 or sizes["tp"] > 1


def _sum_norms(norms: Tensor, parameters: Sequence[Tensor], is_max: bool) -> Tensor:
    """Numbers of whole parameters out of those of the elements here (`smp.optimizers.SumNorms`).

    In order of rank, so that all ranks get the same bits.
    """
    current = runtime.current()
    whole = norms.cpu()
    if current.sizes["shard"] > 1:
        whole = _combine(comm.of_shard_group(comm.allgather(whole, comm.RDP_GROUP)), is_max)
    if current.sizes["tp"] > 1:
        split = torch.tensor([interval_of(model_parameter_of(p)) is not None for p in parameters])
        over_ranks = _combine(comm.allgather(whole, comm.TP_GROUP), is_max)
        whole = torch.where(split, over_ranks, whole)
    return whole.to(norms.device)


def _combine(parts: Sequence[Tensor], is_max: bool) -> Tensor:
    stacked = torch.stack(list(parts))
    return stacked.amax(dim=0) if is_max else stacked.sum(dim=0)
