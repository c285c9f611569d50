"""Where the backward of a model begins: tensors, some of them on other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from smp.device_numbers import moved
from smp.pipeline.remote_tensor import RemoteTensor


def is_one(weight: float | Tensor) -> bool:
    """Does the host know that there is nothing to multiply with?"""
    return not isinstance(weight, Tensor) and weight == 1.0


def weighted(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None,
    weight: float | Tensor,
    ahead: bool,
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """The same backward with all gradients multiplied by ``weight``.

    Args:
        tensors, grad_tensors: of `DistributedModel.backward`.
        weight: factor; a float64 tensor without dimensions if only the device knows it.
        ahead: not to wait for tensors that are on another rank.
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if grad_tensors is None:
        grads: list[Tensor | None] = [None] * len(tensors)
    else:
        grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors)
    for i, (tensor, grad) in enumerate(zip(tensors, grads, strict=False)):
        if grad is not None:
            grads[i] = grad if is_one(weight) else _times(grad, weight)
        elif tensor.numel() == 1:  # autograd refuses others without a gradient
            grads[i] = _filled(tensor, weight, ahead)
    return tensors, grads


def _filled(tensor: Tensor, weight: float | Tensor, ahead: bool) -> Tensor:
    if isinstance(weight, Tensor):
        return moved(weight, tensor.device).to(tensor.dtype).reshape(tensor.shape)
    if ahead:
        return torch.full(tensor.shape, weight, dtype=tensor.dtype, device=tensor.device)
    return torch.full_like(tensor, weight)


def _times(grad: Tensor, weight: float | Tensor) -> Tensor:
    if not isinstance(weight, Tensor):
        return grad * weight
    # As with a number of the host, which 16-bit tensors are multiplied with in float32.
    dtype = torch.promote_types(grad.dtype, torch.float32)
    factor = moved(weight, grad.device).to(dtype)
    return (grad.to(dtype) * factor).to(grad.dtype)


def run_backward(
    roots: tuple[Tensor, ...], grad_tensors: Tensor | Sequence[Tensor | None] | None
) -> None:
    """``torch.autograd.backward``, which also begins at handles of tensors on other ranks.

    Args:
        roots, grad_tensors: where it begins, and with which gradients.
    """
    known = grad_tensors is not None and all(grad is not None for grad in grad_tensors)
    if known and any(isinstance(root, RemoteTensor) for root in roots):
        # torch.autograd.backward would ask handles for their data first.
        _engine_run_backward(
            roots,
            tuple(grad_tensors or ()),
            False,  # keep_graph
            False,  # create_graph
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    else:
        torch.autograd.backward(roots, grad_tensors)
