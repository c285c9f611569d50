"""``smp.clip_grad_norm_``: the norm of the gradients of the whole model, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smp import _C, comm, runtime
from smp.data_parallel import holding_with_master, master_of, model_parameter_of
from smp.precision.gradients import by_device, gradients_of, scale
from smp.tensor_parallel.sharding import interval_of


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that their norm over the whole model is at most ``max_norm``.

    Takes the place of ``torch.nn.utils.clip_grad_norm_``: the norm covers the parameters of all
    pipeline and tensor-parallel ranks and of all shards, each element once, and is the same on
    every rank. The gradient of a parameter that has a master is the one there; a loss scale is
    taken out. Between the step call and ``optimizer.step()``. Collective over the ranks of a
    replica (the MP group), and over the ranks that hold one copy of a sharded state together.

    Args:
        parameters: ``model.parameters()``, or on every rank its part of the same selection;
            parameters without a gradient count as zero.
        max_norm: largest norm that is left alone.
        norm_type: p of the p-norm, > 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise instead of scaling when the norm is infinite or NaN.

    Returns:
        the norm before clipping: a tensor without dimensions, of the gradients' dtype (float64 if
        some rank has gradients of that dtype, else float32).

    Raises:
        ValueError: if ``norm_type`` is not positive or ``max_norm`` is negative.
        RuntimeError: on every rank, if the norm is not finite and ``error_if_nonfinite``.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    updated = list({id(p): p for p in map(master_of, listed)}.values())
    for gradients in {id(g): g for p in updated if (g := gradients_of(p))}.values():
        gradients.unscale()
    norm = global_norm(updated, norm_type)
    if error_if_nonfinite and not math.isfinite(norm.total):
        raise RuntimeError(
            f"{_C.rank_prefix()}the norm of the gradients is {norm.total}, so they cannot be "
            "clipped; pass error_if_nonfinite=False to scale them all the same"
        )
    coefficient = _C.clip_coefficient(norm.total, max_norm)
    if coefficient != 1.0:
        scale(norm.grads, coefficient)
    return norm.as_tensor()


@dataclass(frozen=True)
class GlobalNorm:
    """Norm of gradients over all ranks that hold parts of the model.

    Attributes:
        total: bitwise equal on these ranks.
        has_double: some rank has gradients in float64.
        grads: of this rank.
    """

    total: float
    has_double: bool
    grads: list[Tensor]

    def as_tensor(self) -> Tensor:
        """A tensor without dimensions."""
        dtype = torch.float64 if self.has_double else torch.float32
        device = self.grads[0].device if self.grads else None
        return torch.tensor(self.total, dtype=dtype, device=device)


def global_norm(updated: Sequence[Tensor], norm_type: float = 2.0) -> GlobalNorm:
    """The norm of the gradients as they are. Collective as `clip_grad_norm_`.

    Args:
        updated: what optimizers update: masters, or parameters that have none; each once.
        norm_type: > 0.
    """
    if not norm_type > 0:
        raise ValueError(f"{_C.rank_prefix()}norm_type must be > 0, got {norm_type}")
    having = [p for p in updated if p.grad is not None and p.grad.numel()]
    grads = [_grad(p) for p in having]
    power = _power_sum([_grad(p) for p in having if _counts(p)], norm_type)
    part = (power, any(grad.dtype == torch.float64 for grad in grads))
    if runtime.current().sizes["shard"] > 1:
        part = _combined(comm.of_shard_group(comm.allgather(part, comm.RDP_GROUP)), norm_type)
    if comm.mp_size() > 1:
        part = _combined(comm.allgather(part, comm.MP_GROUP), norm_type)
    total = part[0] if math.isinf(norm_type) else part[0] ** (1.0 / norm_type)
    return GlobalNorm(total, part[1], grads)


def _counts(updated: Tensor) -> bool:
    """Is it this rank's to count? Others may hold the same elements."""
    current = runtime.current()
    if current.ranks["tp"] != 0 and interval_of(model_parameter_of(updated)) is None:
        return False
    return current.ranks["shard"] == 0 or holding_with_master(updated) is not None


def _combined(parts: Sequence[tuple[float, bool]], norm_type: float) -> tuple[float, bool]:
    """In order of rank, so that all ranks get the same bits."""
    has_double = any(double for _, double in parts)
    powers = [power for power, _ in parts]
    if not math.isinf(norm_type):
        return sum(powers), has_double
    return (math.nan if any(map(math.isnan, powers)) else max(powers)), has_double


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def _power_sum(grads: Sequence[Tensor], norm_type: float) -> float:
    """Sum of ``|x| ** norm_type`` over all elements in double precision; the maximum if inf."""
    if norm_type == 2.0:
        return sum(
            float(torch.ops.smp.sum_of_squares(group)) for group in by_device(grads).values()
        )
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads]
    if not norms:
        return 0.0
    values = torch.stack([norm.to(norms[0].device) for norm in norms])
    return float(values.max() if math.isinf(norm_type) else values.pow(norm_type).sum())
