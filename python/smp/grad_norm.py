"""``smp.clip_grad_norm_``: the norm of the gradients of the whole model, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from smp import _C, comm
from smp.tensor_parallel.sharding import interval_of


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that their norm over the whole model is at most ``max_norm``.

    Takes the place of ``torch.nn.utils.clip_grad_norm_``: the norm covers the parameters of all
    pipeline and tensor-parallel ranks, each once, and is the same on every rank. Between the step
    call and ``optimizer.step()``. Collective over the ranks of a replica (the MP group).

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
    if not norm_type > 0:
        raise ValueError(f"{_C.rank_prefix()}norm_type must be > 0, got {norm_type}")
    grads, counted = _gradients(parameters)
    has_double = any(grad.dtype == torch.float64 for grad in grads)
    parts = [(_power_sum(counted, norm_type), has_double)]
    if comm.mp_size() > 1:
        parts = comm.allgather(parts[0], comm.MP_GROUP)
    # In order of rank, so that all ranks get the same bits.
    if math.isinf(norm_type):
        powers = [power for power, _ in parts]
        total = math.nan if any(map(math.isnan, powers)) else max(powers)
    else:
        total = sum(power for power, _ in parts) ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"{_C.rank_prefix()}the norm of the gradients is {total}, so they cannot be clipped; "
            "pass error_if_nonfinite=False to scale them all the same"
        )
    _scale(grads, _C.clip_coefficient(total, max_norm))
    dtype = torch.float64 if any(double for _, double in parts) else torch.float32
    return torch.tensor(total, dtype=dtype, device=grads[0].device if grads else None)


def _gradients(parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients that are there, one per parameter however often this is listed.

    Returns:
        all of them, and those that count here: slices, and on the first tensor-parallel rank those
        of parameters that all of them hold.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = {id(parameter): parameter for parameter in listed}
    having = [parameter for parameter in unique.values() if parameter.grad is not None]
    counts_whole = comm.tp_rank() == 0
    counted = [p for p in having if counts_whole or interval_of(p) is not None]
    return [_grad(p) for p in having], [_grad(p) for p in counted]


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def _power_sum(grads: Sequence[Tensor], norm_type: float) -> float:
    """Sum of ``|x| ** norm_type`` over all elements in double precision; the maximum if inf."""
    if norm_type == 2.0:
        return sum(
            float(torch.ops.smp.sum_of_squares(group)) for group in _by_device(grads).values()
        )
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads]
    if not norms:
        return 0.0
    values = torch.stack([norm.to(norms[0].device) for norm in norms])
    return float(values.max() if math.isinf(norm_type) else values.pow(norm_type).sum())


def _scale(grads: Sequence[Tensor], coefficient: float) -> None:
    if coefficient == 1.0:
        return
    for device, group in _by_device(grads).items():
        factor = torch.tensor(coefficient, dtype=torch.float64, device=device)
        torch.ops.smp.scale_(group, factor)


def _by_device(grads: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return groups
