"""``smp.clip_grad_norm_``: the norm of the gradients of the whole model, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import smp._C as _C
from smp.precision.gradients import gradients_of, scale, sum_of_squares
from smp.precision.holdings import holding_with_master, master_of, model_parameter_of
from smp.tensor_parallel.sharding import interval_of
from smp.world import device_numbers, runtime
from smp.world.rank import Rank


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that their norm over the whole model is at most ``max_norm``.

    Replaces ``torch.nn.utils.clip_grad_norm_``: the norm covers the parameters of all pipeline and
    tensor-parallel ranks and of all shards, each element once, and is the same on every rank. If a
    parameter has a master, the gradient of the master counts. The loss scale is divided out. Call
    it between the step call and ``optimizer.step()``. Collective over the ranks of a replica (the
    MP group), and over the ranks that hold one copy of a sharded state together.

    The host does not wait for the device, unless ``error_if_nonfinite``.

    Args:
        parameters: ``model.parameters()``, or on every rank its part of the same selection;
            parameters without a gradient count as zero.
        max_norm: largest norm that is not clipped.
        norm_type: p of the p-norm, > 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: whether to raise instead of scaling when the norm is infinite or NaN.

    Returns:
        the norm before clipping: a scalar tensor on the device of this rank, float64 if one of the
            parameters is, else float32.

    Raises:
        ValueError: ``norm_type`` is not positive, or ``max_norm`` is negative.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``, on every rank; or a step
            function is running.
    """
    norm = _true_norm(runtime.current(), parameters, norm_type, "clip_grad_norm_", max_norm)
    if error_if_nonfinite and not math.isfinite(total := norm.total.item()):
        raise RuntimeError(
            f"{_C.rank_prefix()}the norm of the gradients is {total}, so they cannot be clipped; "
            "pass error_if_nonfinite=False to scale them all the same"
        )
    scale(norm.grads, 1.0 / norm.divisor(max_norm))
    return norm.rounded(norm.total)


def grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm of the gradients over the whole model, and does not change them.

    If each rank has a part of the model, a norm that a script computes from ``.grad`` is that of
    the part. Collective like `clip_grad_norm_`, and called at the same place.

    Args:
        parameters: ``model.parameters()``, or on every rank its part of the same selection.
        norm_type: p of the p-norm, > 0; ``math.inf`` for the largest absolute value.

    Returns:
        the norm: a scalar tensor on the device of this rank, equal on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: a step function is running.
    """
    norm = _true_norm(runtime.current(), parameters, norm_type, "grad_norm")
    return norm.rounded(norm.total)


def _true_norm(
    current: runtime.Runtime,
    parameters: Tensor | Iterable[Tensor],
    norm_type: float,
    what: str,
    *arguments: float,
) -> GlobalNorm:
    """Divides the loss scale out of gradients, and computes their norm. Collective."""
    current.steps.refuse_inside(what)
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    updated = list({id(p): p for p in map(master_of, listed)}.values())
    if current.wrapped.uneven is not None:
        models = map(model_parameter_of, updated)
        current.wrapped.uneven.call(what, models, *arguments, norm_type)
    for gradients in {id(g): g for p in updated if (g := gradients_of(p))}.values():
        gradients.unscale()
    if current.part_gradients is not None:
        current.part_gradients.norm_was_read()
    return global_norm(current.rank, updated, norm_type)


@dataclass(frozen=True)
class GlobalNorm:
    """The norm of gradients over all ranks that hold parts of the model.

    Attributes:
        total: a float64 scalar tensor on the device; bitwise equal on these ranks.
        dtype: dtype of the norm that users get.
        grads: gradients of this rank.
    """

    total: Tensor
    dtype: torch.dtype
    grads: list[Tensor]

    def divisor(self, max_norm: float, scale: Tensor | None = None) -> Tensor:
        """Returns the divisor for a norm of at most ``max_norm``, as ``clip_grad_norm_`` of torch.

        Args:
            max_norm: >= 0.
            scale: factor by which gradients are too large, which the divisor includes.

        Returns:
            a float64 scalar tensor on the device; NaN if the norm is.
        """
        divisor: Tensor = torch.ops.smp.clip_divisor(self.total.square(), max_norm, scale)[0]
        return divisor

    def rounded(self, norm: Tensor) -> Tensor:
        """Returns ``norm`` in the dtype for users."""
        return norm.to(self.dtype)


def refuse_without_gradients(rank: Rank, what: str) -> None:
    """Raises a ValueError where gradients were applied and dropped during the backward."""
    if rank.config.update_in_backward:
        raise ValueError(
            f"{_C.rank_prefix()}smp config: update_in_backward: {what} is needed, but each "
            "gradient was applied and dropped in the backward, before others existed; leave it out "
            "(an optimizer may bound updates by parameter instead), or set update_in_backward=False"
        )


def global_norm(rank: Rank, updated: Sequence[Tensor], norm_type: float = 2.0) -> GlobalNorm:
    """Computes the norm of unchanged gradients. Collective like `clip_grad_norm_`.

    Args:
        rank: calling rank.
        updated: tensors that optimizers update: masters, or parameters without; each once.
        norm_type: > 0.
    """
    refuse_without_gradients(rank, "the norm of all gradients")
    if not norm_type > 0:
        raise ValueError(f"{_C.rank_prefix()}norm_type must be > 0, got {norm_type}")
    having = [p for p in updated if p.grad is not None and p.grad.numel()]
    counted = [_grad(p) for p in having if _counts(rank, p)]
    power = _power_sum(counted, norm_type, rank.device).reshape(1)
    is_max = math.isinf(norm_type)
    combine = device_numbers.maxima if is_max else device_numbers.sums
    power = combine(rank, power, ("shard", "mp")).reshape(())
    if is_max:
        total = power
    else:
        total = power.sqrt() if norm_type == 2.0 else power.pow(1.0 / norm_type)
    is_double = any(p.dtype == torch.float64 for p in updated)
    dtype = torch.float64 if is_double else torch.float32
    return GlobalNorm(total, dtype, [_grad(p) for p in having])


def _counts(rank: Rank, updated: Tensor) -> bool:
    """Returns whether this rank counts a tensor; others may hold the same elements."""
    if rank.ranks["tp"] != 0 and interval_of(model_parameter_of(updated)) is None:
        return False
    return rank.ranks["shard"] == 0 or holding_with_master(updated) is not None


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def _power_sum(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the sum of ``|x| ** norm_type`` over all elements in float64; the maximum if inf."""
    if norm_type == 2.0:
        return sum_of_squares(grads, device)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads]
    zero = device_numbers.number(0.0, device)
    if not norms:
        return zero
    values = torch.stack([device_numbers.moved(norm, zero.device) for norm in norms])
    return values.max() if math.isinf(norm_type) else values.pow(norm_type).sum()
