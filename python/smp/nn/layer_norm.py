"""Layer norm and RMS norm on the fused operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smp.nn import functional
from smp.nn.layout import Layout


class FusedLayerNorm(nn.LayerNorm):
    """An ``nn.LayerNorm`` in one operator; replaces the class of that name in apex.

    Args:
        normalized_shape: trailing dims that are normalised together.
        eps: number added to the variance.
        elementwise_affine: the norm has a weight and, by ``bias``, a bias.
        bias: the norm has a bias, if ``elementwise_affine``.
        device, dtype: device and dtype of the parameters.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the trailing dims of ``[*, normalized_shape]``."""
        num_dims = len(self.normalized_shape)
        if num_dims == 1:
            return functional.layer_norm(input, self.weight, self.bias, self.eps)
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        result = functional.layer_norm(input.flatten(-num_dims), weight, bias, self.eps)
        return result.reshape(input.shape)


class FusedRMSNorm(nn.Module):
    """A division by the root of the mean square, times a weight (Zhang and Sennrich 2019).

    Args:
        hidden_size: size of the last dim, which is normalised.
        eps: number added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the last dim of ``[*, hidden_size]``."""
        return functional.rms_norm(input, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


def make_norm(hidden_size: int, eps: float, layout: Layout) -> FusedLayerNorm:
    """Makes a norm of a distributed module, held whole by every rank.

    Args:
        hidden_size, eps: arguments of the norm.
        layout: layout of the activations that it normalises.
    """
    norm = FusedLayerNorm(hidden_size, eps=eps)
    layout.mark_whole(norm)
    return norm
