"""Fused operators of the distributed modules, on CPU and CUDA.

They take float32, float64, float16 and bfloat16 tensors of any strides. 16-bit numbers are computed
in float32, float64 in float64; results have the dtype of the input unless said otherwise. All have
gradients of first order; a second differentiation raises RuntimeError. Dropout draws no random
numbers: a hash of the seed and of an element's place decides, equally on all devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smp.nn.linear_cross_entropy import linear_cross_entropy

__all__ = [
    "bias_dropout_residual",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "scaled_masked_softmax",
]

_APPROXIMATIONS = ("none", "tanh")


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Returns ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension.

    Args:
        weight: ``[last size of x]``, of any dtype; None for 1.
        bias: ``[last size of x]``, of any dtype; None for 0.
    """
    y: Tensor = torch.ops.smp.layer_norm.default(x, weight, bias, eps)
    return y


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Returns ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension."""
    y: Tensor = torch.ops.smp.rms_norm.default(x, weight, eps)
    return y


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """Returns ``gelu(x + bias)``; ``approximate`` is "none" or "tanh" as in `F.gelu` of torch."""
    if approximate not in _APPROXIMATIONS:
        raise ValueError(f"approximate must be one of {_APPROXIMATIONS}, got {approximate!r}")
    y: Tensor = torch.ops.smp.bias_gelu.default(x, bias, approximate == "tanh")
    return y


def scaled_masked_softmax(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    in_fp32: bool = False,
) -> Tensor:
    """Returns probabilities ``dropout(softmax(scores * scale + mask - slopes * distance))``.

    A query that sees no key, or only keys with ``mask`` -inf, gets probabilities 0.

    Args:
        scores: [batch, heads, queries, keys].
        mask: tensor added to the scores; each dimension as in ``scores`` or 1. Gets no gradient.
        causal: the last query sees all keys, the one before it all but the last, and so on.
        window: number of these keys, the last ones, that a query sees; needs ``causal``.
        slopes: [heads], for ALiBi: times the distance between query and key. Gets no gradient.
        dropout_p: probability of an element to become 0; the others are divided by 1 - p.
        seed: seed of the dropout.
        in_fp32: return float32 for 16-bit scores. The computation is in float32 anyway.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be None or >= 1, got {window}")
    if in_fp32 and scores.dtype.itemsize == 2:
        scores = scores.float()
    y: Tensor = torch.ops.smp.scaled_masked_softmax.default(
        scores, mask, slopes, scale, causal, window or 0, dropout_p, _signed(seed)
    )
    return y


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    seed: int,
    fp32_residual: bool = False,
) -> Tensor:
    """Returns ``residual + dropout(x + bias)``, of the wider dtype of ``x`` and ``residual``.

    Args:
        bias: ``[last size of x]``.
        residual: tensor of the sizes of ``x``.
        p: probability of an element to become 0 before the residual is added.
        seed: seed of the dropout.
        fp32_residual: return float32 for 16-bit input, so that a sum over many layers neither
            overflows nor loses small summands.
    """
    y: Tensor = torch.ops.smp.bias_dropout_residual.default(
        x, bias, residual, p, _signed(seed), fp32_residual
    )
    return y


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Sets elements to 0 with probability ``p`` and divides the others by 1 - p."""
    if p == 0.0:
        return x
    return bias_dropout_residual(x, None, None, p, seed)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool = False
) -> Tensor:
    """Rotates pairs of the first ``rotary_dim`` features of each head; the others are copied.

    Args:
        x: [batch, length, heads, head_size].
        cos, sin: [batch or 1, length, rotary_dim / 2], of the angle of each pair. No gradients.
        interleaved: pairs are neighbours (2 p, 2 p + 1) as in GPT-J, else (p, p + rotary_dim / 2)
            as in GPT-NeoX and Llama.
    """
    if 2 * cos.shape[-1] != rotary_dim:
        raise ValueError(
            f"rotary_dim is {rotary_dim}, so cos must have {rotary_dim / 2:g} angles per position, "
            f"got sizes {list(cos.shape)}"
        )
    y: Tensor = torch.ops.smp.rotary.default(x, cos, sin, interleaved)
    return y


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Returns the loss of each token, [tokens]; 0 where ignored.

    Losses are float64 for float64 logits, else float32.

    Args:
        logits: [tokens, vocabulary].
        targets: [tokens], int64.
        ignore_index: target of tokens that do not count.
        label_smoothing: share of the target distribution that is spread over the vocabulary.

    Raises:
        IndexError: if a target is outside of the vocabulary (on CUDA its loss is NaN instead).
    """
    y: Tensor = torch.ops.smp.cross_entropy.default(logits, targets, ignore_index, label_smoothing)
    return y


def _signed(seed: int) -> int:
    """Returns the low 64 bits of a seed, as the signed number that operators take."""
    low = seed & 0xFFFF_FFFF_FFFF_FFFF
    return low - (1 << 64) if low >= 1 << 63 else low
