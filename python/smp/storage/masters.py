"""Which parts of its parameters a rank updates, and their masters, by configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smp import _C
from smp.modules.materialize import cast
from smp.storage.holdings import Holding, attach
from smp.world import runtime

#: What can become a 16-bit parameter with a float32 master.
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def make_holdings(
    root: nn.Module, local: Sequence[tuple[str, nn.Parameter]], *, bucket_cap_bytes: int
) -> dict[nn.Parameter, Holding] | None:
    """What this rank holds of its trainable parameters; casts the model if it is to have 16 bits.

    Every mode comes through here once, when the model is partitioned and all replicas have the same
    values. Parameters are cast one by one, so that a copy more than needed exists of one of them
    only.

    Args:
        root: the user's model; parameters of other ranks are placeholders.
        local: names in the whole model and parameters of this rank, in one order on all ranks of
            their data-parallel group.
        bucket_cap_bytes: size of a gradient bucket.

    Returns:
        None where the optimizer keeps the parameters themselves.

    Raises:
        ValueError: on every rank, for a parameter that has no 16-bit form.
    """
    half = runtime.current().config.half_dtype
    if half is None:
        return None
    check_castable(root, half)
    holdings = {
        parameter: cast_with_master(name, parameter, half)
        for name, parameter in local
        if parameter.requires_grad and parameter.is_floating_point()
    }
    cast_rest(root, half)
    return holdings


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


def make_master(values: Tensor) -> nn.Parameter:
    """A leaf in float32; it shares the memory of ``values`` if these are float32 already."""
    return nn.Parameter(values.detach().to(torch.float32))


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
    master = make_master(parameter)
    cast(parameter, half)
    holding = Holding(
        name, parameter, 0, parameter.numel(), piece=parameter.detach(), master=master
    )
    attach(holding)
    return holding
