"""Products of linear layers, whose operands have 8 bits or keep their dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smp.tensor_parallel import regions


def use_fp8(layer: nn.Module, scaling: str) -> None:
    """Makes a layer multiply with 8-bit operands.

    Args:
        layer: layer whose forward calls `product`, `fp8_of` or an operator of fp8.
        scaling: "rowwise" or "tensorwise".
    """
    layer.__dict__["_smp_scaling"] = scaling


def fp8_of(layer: object) -> str | None:
    """Returns the scaling of a layer's 8-bit operands, or None if they keep their dtype."""
    scaling: str | None = layer.__dict__.get("_smp_scaling")
    return scaling


def product(
    layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, *, splits_in: bool | None
) -> Tensor:
    """Computes ``F.linear(x, weight, bias)``, with 8-bit operands if the layer has a scaling.

    Args:
        layer: layer that computes.
        x: ``[*, in]`` of this rank.
        weight: ``[out, in]`` of this rank.
        bias: ``[out]`` of this rank, or None.
        splits_in: whether ranks hold parts of the input features; False: of the output features;
            None: they hold whole layers.
    """
    scaling = fp8_of(layer)
    if scaling is None:
        return F.linear(x, weight, bias)
    if splits_in is None:
        whole: Tensor = torch.ops.smp.fp8_linear(x, weight, bias, scaling)
        return whole
    return regions.fp8_linear(x, weight, bias, scaling, splits_in=splits_in)
