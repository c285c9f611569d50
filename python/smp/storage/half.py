"""Casts models to 16-bit parameters with masters."""

from __future__ import annotations

import torch
from torch import nn

import smp._C as _C
from smp.modules.materialize import cast
from smp.modules.training_dtypes import TrainingDtypes, plan_dtypes
from smp.precision.holdings import Holding, attach

#: Dtypes of parameters that can become 16-bit parameters with float32 masters.
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def plan_castable(root: nn.Module, half: torch.dtype | None) -> TrainingDtypes | None:
    """Returns the dtypes of 16-bit training, or None without it.

    Refuses models with parameters of higher precision than masters.

    Raises:
        ValueError: names the first such parameter.
    """
    if half is None:
        return None
    for name, parameter in root.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in _CASTABLE:
            key = "fp16" if half == torch.float16 else "bf16"
            raise ValueError(
                f"{_C.rank_prefix()}smp config: {key}=True: parameter '{name}' has dtype "
                f"{parameter.dtype}, and masters are torch.float32; convert the model with "
                f".float(), or set {key}=False to train it as it is"
            )
    return plan_dtypes(root, half)


def cast_with_master(
    name: str, parameter: nn.Parameter, dtype: torch.dtype, has_master: bool
) -> Holding:
    """Casts a parameter that is whole on this rank; its former values become its master.

    A parameter that stays in float32, and one without a master of its own, share their memory with
    the holding's master.

    Args:
        name: name in the whole model.
        parameter: parameter with values.
        dtype: dtype of the parameter in training.
        has_master: whether a parameter of 16 bits has a master in float32.
    """
    if has_master:
        # The master shares the memory of the parameter if that is float32 already.
        master = nn.Parameter(parameter.data.to(torch.float32))
        if dtype == torch.float32:
            parameter.data = master.data
        cast(parameter, dtype)
    else:
        cast(parameter, dtype)
        master = nn.Parameter(parameter.data)
    holding = Holding(
        name, parameter, 0, parameter.numel(), piece=parameter.detach(), master=master
    )
    attach(holding)
    return holding
