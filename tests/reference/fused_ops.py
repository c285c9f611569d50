"""The operators of `smp.nn.functional` as plain PyTorch expressions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def make(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers; equal arguments give equal ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    return functional.gelu(x if bias is None else x + bias, approximate=approximate)


def scaled_masked_softmax(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Every query must see a key."""
    queries, keys = scores.shape[-2:]
    scores = scores * scale
    if mask is not None:
        scores = scores + mask
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(distance >= window, -torch.inf)
    return scores.softmax(-1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1)
