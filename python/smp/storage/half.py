"""Models that get 16-bit parameters with masters."""

from __future__ import annotations

import torch
from torch import nn

import smp._C as _C
from smp.modules.materialize import cast
from smp.precision.holdings import Holding, attach

#: What can become a 16-bit parameter with a float32 master.
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def check_castable(root: nn.Module, half: torch.dtype) -> None:
    """Refuses models whose precision a 16-bit run would throw away.

    Raises:
        ValueError: names the first such parameter.
    """
    for name, parameter in root.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in _CASTABLE:
            key = "fp16" if half == torch.float16 else "bf16"
            raise ValueError(
                f"{_C.rank_prefix()}smp config: {key}=True: parameter '{name}' has dtype "
                f"{parameter.dtype}, and masters are torch.float32; convert the model with "
                f".float(), or set {key}=False to train it as it is"
            )


def cast_rest(root: nn.Module, half: torch.dtype) -> None:
    """Casts what has not been cast yet as ``root.to(half)`` would: frozen parameters, those of
    other ranks, floating buffers."""
    for parameter in root.parameters():
        if parameter.is_floating_point():
            cast(parameter, half)
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != half:
                module._buffers[name] = buffer.to(half)


def cast_with_master(name: str, parameter: nn.Parameter, half: torch.dtype) -> Holding:
    """Casts a parameter that is whole on this rank; what it had becomes its master."""
    # Shares the memory of the parameter if that is float32 already.
    master = nn.Parameter(parameter.data.to(torch.float32))
    cast(parameter, half)
    holding = Holding(
        name, parameter, 0, parameter.numel(), piece=parameter.detach(), master=master
    )
    attach(holding)
    return holding
