"""A linear layer with 8-bit operands, written as a plain script would: decoded numbers, products.

It shares no code with the library. Its factors come from logarithms, and its products from numbers
that were decoded again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(numbers: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """Returns numbers as 8 bits hold them.

    Args:
        numbers: matrix.
        dtype: format of 8 bits.
        dim: dim of the numbers that share a factor; None: all of them do.
    """
    sizes = numbers.abs()
    largest = sizes.amax() if dim is None else sizes.amax(dim, keepdim=True)
    largest = largest.double().clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))
    return (numbers.double() * scale).float().to(dtype).double() / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row, ctx.has_bias = by_row, bias is not None
        dim = 1 if by_row else None
        y = rounded(x, VALUES, dim) @ rounded(weight, VALUES, dim).t()
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        by_row = ctx.by_row
        coded = rounded(grad, GRADIENTS, 1 if by_row else None)
        dx = (coded @ rounded(weight, VALUES, 0 if by_row else None)).to(x.dtype)
        if by_row:
            dweight = (grad.double().t() @ x.double()).to(x.dtype)
        else:
            dweight = (coded.t() @ rounded(x, VALUES, None)).to(x.dtype)
        return dx, dweight, grad.sum(0) if ctx.has_bias else None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str) -> Tensor:
    """Returns ``F.linear(x, weight, bias)`` of a matrix, with 8-bit operands."""
    result: Tensor = _Product.apply(x, weight, bias, scaling == "rowwise")
    return result


class Fp8Layer(nn.Linear):
    """An ``nn.Linear`` whose products have 8-bit operands.

    Attributes:
        scaling: "rowwise" or "tensorwise".
        num: number of matrices that lie behind each other in the weight, with factors of their own.
    """

    scaling: str
    num: int

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        weights, biases = self.weight.chunk(self.num), [None] * self.num
        if self.bias is not None:
            biases = self.bias.chunk(self.num)
        parts = [product(rows, w, b, self.scaling) for w, b in zip(weights, biases, strict=True)]
        return torch.cat(parts, -1).view(*input.shape[:-1], self.out_features)


def use_fp8(layer: nn.Linear, scaling: str, num: int = 1) -> None:
    """Makes a layer compute with 8-bit operands; parameters stay the same.

    Args:
        layer: layer of a plain script.
        scaling: "rowwise" or "tensorwise".
        num: number of matrices in its weight.
    """
    layer.__class__ = Fp8Layer
    layer.scaling, layer.num = scaling, num
