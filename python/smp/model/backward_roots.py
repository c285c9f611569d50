"""Roots of the backward of a model: tensors, some of them on other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

import smp._C as _C
from smp.pipeline.remote_tensor import RemoteTensor
from smp.world.device_numbers import moved

#: PyTorch's own function, which is replaced while models are wrapped
torch_backward = torch.autograd.backward


def is_one(weight: float | Tensor) -> bool:
    """Returns whether a factor is the number 1 of the host."""
    return not isinstance(weight, Tensor) and weight == 1.0


def is_zero(factor: float | Tensor) -> bool:
    """Returns whether a factor is the number 0 of the host: a microbatch counts nothing."""
    return not isinstance(factor, Tensor) and factor == 0.0


def listed(
    pp_rank: int,
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None,
) -> tuple[list[Tensor], list[Tensor | None] | None]:
    """Returns the arguments of `DistributedModel.backward` as lists.

    Raises:
        TypeError: an argument has something else than tensors.
        ValueError: the numbers of gradients and of tensors differ.
    """
    roots = _tensors_in(pp_rank, "tensors", tensors)
    for root in roots:
        if root is None:
            _refuse(pp_rank, "tensors", root)
    if grad_tensors is None:
        return roots, None  # type: ignore[return-value]
    grads = _tensors_in(pp_rank, "grad_tensors", grad_tensors)
    if len(grads) != len(roots):
        raise ValueError(
            f"{_C.rank_prefix()}model.backward got {len(roots)} tensors and {len(grads)} "
            "grad_tensors; give one gradient, or None, for each tensor"
        )
    return roots, grads  # type: ignore[return-value]


def _tensors_in(pp_rank: int, name: str, given: object) -> list[Tensor | None]:
    if isinstance(given, Tensor):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        _refuse(pp_rank, name, given)
    items = list(given)
    for item in items:
        if item is not None and not isinstance(item, Tensor):
            _refuse(pp_rank, name, item)
    return items


def _refuse(pp_rank: int, name: str, given: object) -> NoReturn:
    what = "None" if given is None else f"a {type(given).__name__}"
    if name == "tensors" and pp_rank > 0:
        raise TypeError(
            f"{_C.rank_prefix()}model.backward got {what} in the place of a loss, on pipeline rank "
            f"{pp_rank}. The forward of the whole model runs on pipeline rank 0 only, so "
            "attributes that it writes (such as model.last_loss) are not set here, but its results "
            "are here: return the loss from forward"
        )
    raise TypeError(
        f"{_C.rank_prefix()}model.backward takes a tensor or a sequence of tensors as {name}, got "
        f"{what}; pass the loss as the model returned it, without .item()"
    )


def weighted(
    tensors: Sequence[Tensor],
    grad_tensors: Sequence[Tensor | None] | None,
    weight: float | Tensor,
    ahead: bool,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns roots and gradients of the same backward, multiplied by ``weight``.

    Args:
        tensors, grad_tensors: results of `listed`.
        weight: factor; a float64 scalar tensor if only the device has its value.
        ahead: whether not to wait for tensors that are on another rank.
    """
    roots = list(tensors)
    grads: list[Tensor | None] = list(grad_tensors or [None] * len(roots))
    for i, (tensor, grad) in enumerate(zip(roots, grads, strict=True)):
        if grad is not None:
            grads[i] = grad if is_one(weight) else _times(grad, weight)
        elif tensor.numel() == 1:  # autograd refuses others without a gradient
            grads[i] = _filled(tensor, weight, ahead)
    return roots, grads


def _filled(tensor: Tensor, weight: float | Tensor, ahead: bool) -> Tensor:
    if isinstance(weight, Tensor):
        return moved(weight, tensor.device).to(tensor.dtype).reshape(tensor.shape)
    if ahead:
        return torch.full(tensor.shape, weight, dtype=tensor.dtype, device=tensor.device)
    return torch.full_like(tensor, weight)


def _times(grad: Tensor, weight: float | Tensor) -> Tensor:
    if not isinstance(weight, Tensor):
        return grad * weight
    # Like a number of the host, by which 16-bit tensors are multiplied in float32.
    dtype = torch.promote_types(grad.dtype, torch.float32)
    factor = moved(weight, grad.device).to(dtype)
    return (grad.to(dtype) * factor).to(grad.dtype)


def run_backward(roots: tuple[Tensor, ...], grad_tensors: Sequence[Tensor | None] | None) -> None:
    """Runs ``torch.autograd.backward``, also from handles of tensors on other ranks.

    Args:
        roots, grad_tensors: tensors at which the backward begins, and their gradients.
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
        torch_backward(roots, grad_tensors)
