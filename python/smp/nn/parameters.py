"""Functions that make and initialise parameters of which a rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from smp.tensor_parallel import regions, sharding
from smp.tensor_parallel.registry import Unsupported


def split_or_refuse(extent: int, what: str) -> list[int]:
    """Returns the sizes of the parts of ``extent`` units, by rank.

    Args:
        extent: number of units.
        what: name of what is split, for the message.

    Raises:
        Unsupported: a rank would get no units.
    """
    sizes = sharding.split(extent)
    if sizes[-1] == 0:
        raise Unsupported(
            f"{what} is {extent}, which {len(sizes)} tensor-parallel ranks cannot share; "
            f"it has to be at least {len(sizes)}"
        )
    return sizes


def add_split(
    module: nn.Module, name: str, shape: Sequence[int], dim: int, sizes: Sequence[int]
) -> None:
    """Registers this rank's slice of a parameter; `reset_parameters` fills it.

    Args:
        module, name: module and name of the parameter.
        shape: shape of the whole parameter.
        dim: dim along which it is split.
        sizes: sizes of the slices, by rank.
    """
    begin = sharding.begin_of(sizes)
    local = list(shape)
    local[dim] = sizes[regions.rank()]
    module.register_parameter(name, nn.Parameter(torch.empty(local)))
    # A context may have replaced the parameter by another object.
    sharding.mark_split(getattr(module, name), dim, begin, shape[dim])


def fill(parameter: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Initialises a parameter or this rank's slice of it.

    The whole tensor is drawn and cut, so that values do not depend on the tensor-parallel degree;
    degree 1 does the same. Parameters on the meta device are skipped.

    Args:
        parameter: parameter, marked if it is split.
        draw: function that fills a tensor of the whole shape.
    """
    if parameter.is_meta:
        return
    with torch.no_grad():
        whole = parameter.new_empty(sharding.whole_shape(parameter))
        draw(whole)
        parameter.copy_(sharding.slice_of(whole, sharding.interval_of(parameter)))


def fill_linear(
    weight: nn.Parameter, bias: nn.Parameter | None, fan_in: int, std: float | None
) -> None:
    """Initialises a linear layer: normal with a zero bias, or as ``nn.Linear`` does.

    Args:
        weight, bias: parameters of the layer.
        fan_in: input features of the whole layer.
        std: standard deviation of the weight; None for the uniform distribution of ``nn.Linear``.
    """
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    if std is None:
        fill(weight, lambda t: t.uniform_(-bound, bound))
    else:
        fill(weight, lambda t: t.normal_(0.0, std))
    if bias is not None:
        fill(bias, Tensor.zero_ if std is not None else lambda t: t.uniform_(-bound, bound))
