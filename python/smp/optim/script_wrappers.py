"""Replaces FP16 optimizers of the script's own, in the manner of apex, by ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.precision.loss_scaler import DYNAMIC_ARGUMENTS


@dataclass(frozen=True)
class OptimizerParts:
    """The components of such an optimizer.

    Attributes:
        optimizer: the inner optimizer, over the parameters of the model.
        loss_scale: the present scale.
        is_dynamic: whether the scale follows overflows.
        loss_args: arguments of a dynamic scale.
    """

    optimizer: torch.optim.Optimizer
    loss_scale: float
    is_dynamic: bool
    loss_args: dict[str, Any]


def take_apart(given: object, does_fp16: bool) -> OptimizerParts | None:
    """Returns optimizer and loss scale inside of an FP16 optimizer; None for other objects.

    An FP16 optimizer is an object that is no ``Optimizer``, has one under ``optimizer``, and has
    the scaler and the groups of 16-bit parameters of apex' FP16 optimizer. Its masters are replaced
    by their parameters again, for which our masters are made.

    Args:
        given: object that a script wraps.
        does_fp16: whether the configuration asks for FP16 training.

    Raises:
        ValueError: training is not in FP16, so there would be no masters and no loss scale.
    """
    inner = getattr(given, "optimizer", None)
    scaler = getattr(given, "loss_scaler", None)
    is_wrapper = isinstance(inner, torch.optim.Optimizer) and hasattr(given, "fp16_groups")
    if isinstance(given, torch.optim.Optimizer) or not is_wrapper or scaler is None:
        return None
    assert isinstance(inner, torch.optim.Optimizer)
    if not does_fp16:
        raise ValueError(
            f"{_C.rank_prefix()}the {type(given).__name__} of the script is replaced by smp's own "
            "masters and loss scale, which need fp16=True in the configuration (fp16_params alone "
            'makes none); add "fp16": True to the configuration'
        )
    _give_back_parameters(given, inner)
    scale = float(getattr(scaler, "cur_scale", getattr(scaler, "loss_scale", 1.0)))
    loss_args = {name: getattr(scaler, name) for name in DYNAMIC_ARGUMENTS if hasattr(scaler, name)}
    loss_args["init_scale"] = scale
    is_dynamic = bool(getattr(given, "dynamic_loss_scale", False))
    return OptimizerParts(inner, scale, is_dynamic, loss_args)


def _give_back_parameters(given: Any, inner: torch.optim.Optimizer) -> None:
    """Puts the model's parameters back into the groups, instead of masters of the wrapper."""
    parameter_of: dict[Tensor, Tensor] = {}
    groups: Iterable[Any] = zip(
        given.fp16_groups, getattr(given, "fp32_from_fp16_groups", ()), strict=False
    )
    for parameters, masters in groups:
        parameter_of.update(zip(masters, parameters, strict=True))
    for group in inner.param_groups:
        group["params"] = [parameter_of.get(p, p) for p in group["params"]]
    for master, parameter in parameter_of.items():
        if master in inner.state:
            inner.state[parameter] = inner.state.pop(master)
