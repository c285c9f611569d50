"""Attention over a block of the keys, with the logarithms of the sums that softmax divides by.

Results of blocks are merged by these logarithms, and gradients of a block follow from the result
and the logarithms of all blocks: Milakov & Gimelshein 2018 (arXiv:1805.02867), and Dao et al. 2022
(arXiv:2205.14135). PyTorch's kernels compute both; where none does, products are written out.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_OPS: Any = torch.ops.aten


@dataclass(frozen=True)
class Block:
    """The form of attention over a block.

    Attributes:
        mask: added to scores, ``[B, 1 or heads, Q, K]`` of the queries' dtype; or None.
        is_causal: whether query i reads keys 0 to i; then there is no mask, and Q is K.
        scale: factor of the scores.
    """

    mask: Tensor | None
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class Rows:
    """Queries and what their backward needs; results and sums are those of all blocks.

    Attributes:
        query: queries ``[B, heads, Q, D]``.
        out: results ``[B, heads, Q, V]``.
        sums: logarithms of the sums of exponentials ``[B, heads, Q]``.
        grad: gradient of the results.
    """

    query: Tensor
    out: Tensor
    sums: Tensor
    grad: Tensor


def forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Computes attention over the keys of a block.

    Args:
        query: ``[B, heads, Q, D]``.
        key: ``[B, heads, K, D]``.
        value: ``[B, heads, K, V]``.
        block: form.

    Returns:
        results ``[B, heads, Q, V]``, zero for queries that read no key, and the logarithms of the
        sums of exponentials ``[B, heads, Q]``, -inf for these; of float32, or float64 for such
        queries.
    """
    out, sums = _kernel(query, key, value)(query, key, value, block)
    if block.mask is None:
        return out, sums
    # Kernels return some number for a row that reads nothing.
    reads_none = (block.mask == -math.inf).all(-1)
    return (
        out.masked_fill(reads_none.unsqueeze(-1), 0.0),
        sums.masked_fill(reads_none, -math.inf),
    )


def backward(rows: Rows, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, and of keys and values of a block.

    Args:
        rows: queries.
        key, value, block: arguments of `forward`.
    """
    has_none = rows.sums == -math.inf  # these rows have no exponentials
    rows = dataclasses.replace(rows, sums=rows.sums.masked_fill(has_none, math.inf))
    kernel = _kernel(rows.query, key, value)
    gradients: tuple[Tensor, Tensor, Tensor] = _BACKWARD[kernel](rows, key, value, block)
    return gradients


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> Any:
    has_one_size = query.shape[-1] == value.shape[-1]
    if query.device.type == "cpu" and has_one_size:
        return _on_cpu
    if query.device.type == "cuda" and has_one_size and query.dtype != torch.float64:
        return _on_cuda if query.shape[-1] % 8 == 0 else _written_out
    return _written_out


# ---- kernels of PyTorch for CPUs


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    out, sums = _OPS._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, block.is_causal, attn_mask=block.mask, scale=block.scale
    )
    return out, sums


def _on_cpu_backward(
    rows: Rows, key: Tensor, value: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = _OPS._scaled_dot_product_flash_attention_for_cpu_backward(
        rows.grad,
        rows.query,
        key,
        value,
        rows.out,
        rows.sums,
        0.0,
        block.is_causal,
        attn_mask=block.mask,
        scale=block.scale,
    )
    return gradients


# ---- kernels of PyTorch for GPUs


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    out, sums, _, _ = _OPS._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        _aligned(block.mask, query),
        True,
        0.0,
        block.is_causal,
        scale=block.scale,
    )
    return out, sums[..., : query.shape[-2]]  # its rows are filled up to a multiple


def _on_cuda_backward(
    rows: Rows, key: Tensor, value: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    fill = -rows.sums.shape[-1] % _SUMS_MULTIPLE
    seed = torch.zeros((), dtype=torch.int64, device=key.device)  # nothing drops
    gradients = _OPS._scaled_dot_product_efficient_attention_backward(
        rows.grad,
        rows.query,
        key,
        value,
        _aligned(block.mask, rows.query),
        rows.out,
        F.pad(rows.sums, (0, fill), value=math.inf),
        seed,
        seed,
        0.0,
        [True, True, True, False],
        block.is_causal,
        scale=block.scale,
    )
    return gradients[0], gradients[1], gradients[2]


_SUMS_MULTIPLE = 32
_MASK_MULTIPLE = 16


def _aligned(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Returns a mask for each head whose rows begin at multiples that the kernel asks for."""
    if mask is None:
        return None
    num_keys = mask.shape[-1]
    filled = F.pad(mask, (0, -num_keys % _MASK_MULTIPLE))[..., :num_keys]
    return filled.expand(query.shape[0], query.shape[1], query.shape[2], num_keys)


# ---- written out


def _written_out(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, block)
    sums = scores.logsumexp(-1)
    return ((scores - sums.unsqueeze(-1)).exp() @ value.to(scores.dtype)).to(query.dtype), sums


def _written_out_backward(
    rows: Rows, key: Tensor, value: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(rows.query, key, block) - rows.sums.unsqueeze(-1)).exp()
    exact = weights.dtype
    grad, query, out = (x.to(exact) for x in (rows.grad, rows.query, rows.out))
    of_weights = grad @ value.to(exact).mT
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * block.scale
    return (
        (of_scores @ key.to(exact)).to(rows.query.dtype),
        (of_scores.mT @ query).to(key.dtype),
        (weights.mT @ grad).to(value.dtype),
    )


def _scores(query: Tensor, key: Tensor, block: Block) -> Tensor:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ key.to(exact).mT * block.scale
    if block.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, -math.inf)
    return scores if block.mask is None else scores + block.mask


_BACKWARD = {
    _on_cpu: _on_cpu_backward,
    _on_cuda: _on_cuda_backward,
    _written_out: _written_out_backward,
}
