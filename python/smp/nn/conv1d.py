"""transformers' ``Conv1D``: a linear layer whose weight is ``[in, out]``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from smp.nn import layout as layouts
from smp.nn.linear import DistributedLinear
from smp.nn.module import ReadAsWhole
from smp.nn.parameters import add_split, fill, split_or_refuse
from smp.tensor_parallel import sharding


def conv1d_class() -> type[nn.Module] | None:
    """Returns ``Conv1D``, or None if transformers is not imported; imports nothing."""
    found: type[nn.Module] | None = getattr(
        sys.modules.get("transformers.pytorch_utils"), "Conv1D", None
    )
    return found


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is a ``Conv1D``, and not of a subclass."""
    return type(module) is conv1d_class()


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer, with its weight in either order."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


class DistributedConv1D(DistributedLinear):
    """A ``Conv1D``, split over its input features as `DistributedLinear` is.

    Each rank holds ``weight[own part, :]``.

    Args:
        nf: output features.
        nx: input features, at least the tensor-parallel degree.

    Raises:
        Unsupported: a rank would get no features.
    """

    _split_dim = 0

    def __init__(self, nf: int, nx: int) -> None:
        ReadAsWhole.__init__(self)
        self.nf, self.nx = nf, nx
        self.in_features, self.out_features = nx, nf
        self._layout = layouts.current()
        self._sizes = split_or_refuse(nx, "nx")
        add_split(self, "weight", [nx, nf], 0, self._sizes)
        self.bias = nn.Parameter(torch.empty(nf))
        sharding.mark_whole(self.bias, partial=self._layout.has_own_batches)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises this rank's part, as ``Conv1D`` does."""
        fill(self.weight, lambda t: t.normal_(std=0.02))
        if self.bias is not None:
            fill(self.bias, Tensor.zero_)

    def _matrix(self) -> Tensor:
        return self.weight.t()


class Conv1DPart:
    """The first base of the classes that a ``Conv1D`` gets where a plan splits it."""

    nf: int
    nx: int
    weight: nn.Parameter

    @property
    def in_features(self) -> int:
        return self.nx

    @property
    def out_features(self) -> int:
        return self.nf

    def _matrix(self) -> Tensor:
        return self.weight.t()


def arguments_of_conv1d(module: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that make such a module."""
    nx, nf = module.weight.shape
    return (nf, nx), {}
