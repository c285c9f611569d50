"""FP16 optimizers of the script's own, in the manner of apex, which become ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.precision.loss_scaler import DYNAMIC_ARGUMENTS


@dataclass(frozen=True)
class TakenApart:
    """What such an optimizer is made of.

    Attributes:
        optimizer: inside of it, over the parameters of the model.
        loss_scale: the scale that it has now.
        is_dynamic: whether the scale follows overflows.
        loss_args: arguments of a dynamic scale.
    """

    optimizer: torch.optim.Optimizer
    loss_scale: float
    is_dynamic: bool
    loss_args: dict[str, Any]


def take_apart(given: object, does_fp16: bool) -> TakenApart | None:
    """Returns the optimizer and the loss scale inside of an FP16 optimizer; None of anything else.

    One is an object that is no ``Optimizer``, has one under ``optimizer``, and has the scaler and
    the groups of 16-bit parameters of apex' FP16 optimizer. Masters that it has made already are
    replaced by their parameters again, for which ours are made.

    Args:
        given: what a script wraps.
        does_fp16: whether the configuration asks for FP16 training.

    Raises:
        ValueError: training is not in FP16, so that ours would have no masters and no loss scale.
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
            'makes none); add "fp16": True to what smp.init gets'
        )
    _give_back_parameters(given, inner)
    scale = float(getattr(scaler, "cur_scale", getattr(scaler, "loss_scale", 1.0)))
    loss_args = {name: getattr(scaler, name) for name in DYNAMIC_ARGUMENTS if hasattr(scaler, name)}
    loss_args["init_scale"] = scale
    is_dynamic = bool(getattr(given, "dynamic_loss_scale", False))
    return TakenApart(inner, scale, is_dynamic, loss_args)


def _give_back_parameters(given: Any, inner: torch.optim.Optimizer) -> None:
    """Puts the model's parameters into the groups, in the place of masters of the wrapper."""
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
