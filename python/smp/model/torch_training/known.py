"""Finds tensors that belong to wrapped models."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from smp.precision.holdings import master_of, model_parameter_of
from smp.world.wrapped import Wrapped


def known_parameters(wrapped: Wrapped) -> dict[int, nn.Parameter]:
    """Returns the parameters of all wrapped models, by `id`."""
    models = [model for model in wrapped.models if isinstance(model, nn.Module)]
    return {id(p): p for model in models for p in model.parameters()}


def has_known(wrapped: Wrapped, tensors: Iterable[Tensor]) -> bool:
    """Returns whether a tensor is a parameter of a wrapped model, or is updated instead of one."""
    known = known_parameters(wrapped)
    return any(id(model_parameter_of(tensor)) in known for tensor in tensors)


def has_known_gradient(wrapped: Wrapped, tensors: Iterable[Tensor]) -> bool:
    """Returns whether a tensor is the gradient of such a parameter."""
    parameters = known_parameters(wrapped).values()
    updated = (q for p in parameters for q in (p, master_of(p)))
    known = {id(p.grad) for p in updated if p.grad is not None}
    return any(id(tensor) in known for tensor in tensors)
