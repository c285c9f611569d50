"""Computes masks by a hash of a key, the number of a sample, and the place in the sample.

The hash is that of `csrc/kernels/counter_hash.h` with a sample for a row. Its costly part depends
on the place only, and is computed once for all samples of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WORD, _HALF = 2**64 - 1, 2**32 - 1
_MOST_WORDS = 2**20  # words drawn at a time, unless one sample has more


class Slice(NamedTuple):
    """The part of a dim of the whole tensor that this rank has.

    Attributes:
        dim: dim of the tensor, samples included; 0: the rows of each sample.
        begin: first index along the dim.
        extent: size of the whole tensor along the dim.
    """

    dim: int
    begin: int
    extent: int


def mix64(x: int) -> int:
    """Returns the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def mixed(*parts: int) -> int:
    """Returns a number of 64 bits that depends on all numbers and on their order."""
    key = 0
    for part in parts:
        key = mix64((mix64((key + 0x9E3779B97F4A7C15) & _WORD) ^ part) & _WORD)
    return key


def stays(
    key: int,
    ids: Sequence[int],
    sizes: Sequence[int],
    p: float,
    device: torch.device,
    part: Slice | None = None,
) -> Tensor:
    """Returns the mask of the elements that dropout keeps.

    Args:
        key: key of the draw.
        ids: numbers of the samples.
        sizes: sizes of one sample on this rank.
        p: probability that an element is dropped, below 1.
        device: device of the result.
        part: part of the whole sample on this rank; its dim counts the samples as dim 0.

    Returns:
        bool ``[samples, elements of one sample]``.
    """
    places = _places(sizes, device, part)
    first = mix64(~key & _WORD)
    hashes = _place_hash(places, first & _HALF, first >> 32)
    rows = [_row_key(key, idx) for idx in ids]
    offsets = torch.tensor([_signed(row) for row in rows], dtype=torch.int32, device=device)
    factors = torch.tensor(
        [_signed(row >> 32 | 1) for row in rows], dtype=torch.int32, device=device
    )
    threshold = min(int(p * 2**32), _HALF) - 2**31  # hashes are compared without a sign
    kept = torch.empty(len(rows), hashes.numel(), dtype=torch.bool, device=device)
    # A few samples at a time: words take four times the memory of the mask.
    num = max(1, _MOST_WORDS // max(1, hashes.numel()))
    for begin in range(0, len(rows), num):
        some = slice(begin, begin + num)
        drawn = (hashes ^ offsets[some, None]).mul_(factors[some, None])
        torch.ge(drawn.bitwise_xor_(-(2**31)), threshold, out=kept[some])
    return kept


def _places(sizes: Sequence[int], device: torch.device, part: Slice | None) -> Tensor:
    """Returns positions of this rank's elements in the whole sample, modulo 2**32."""
    num = 1
    for size in sizes:
        num *= size
    if part is None or part.extent == sizes[part.dim - 1]:
        if num < 2**31:
            return torch.arange(num, dtype=torch.int32, device=device)
        return torch.arange(num, device=device).to(torch.int32)
    dim = part.dim - 1
    inner = 1
    for size in sizes[dim + 1 :]:
        inner *= size
    outer = num // (sizes[dim] * inner) if sizes[dim] * inner else 0
    begins = torch.arange(outer, device=device)[:, None] * (part.extent * inner)
    inside = torch.arange(sizes[dim] * inner, device=device) + part.begin * inner
    return (begins + inside).flatten().to(torch.int32)


def _place_hash(x: Tensor, first: int, second: int) -> Tensor:
    """Applies a bijection of 32-bit words in place: `column_hash` of the kernels."""
    x ^= _signed(first)
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x21F0AAAD)
    x += _signed(second)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0xD35A2D97)
    x ^= (x >> 15) & 0x1FFFF
    return x


def _row_key(seed: int, row: int) -> int:
    start = mix64((seed + 0x9E3779B97F4A7C15) & _WORD)
    return mix64((start + (row + 1) * 0xD1342543DE82EF95) & _WORD)


def _signed(word: int) -> int:
    word &= _HALF
    return word - 2**32 if word >= 2**31 else word


class _Scaled(torch.autograd.Function):
    """Multiplies by a mask of one byte per element; saves only that mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask * ctx.scale, None, None


def scaled(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns ``x`` times ``scale`` where the mask is true, 0 elsewhere; of the dtype of ``x``."""
    result: Tensor = _Scaled.apply(x, mask, scale)
    return result
