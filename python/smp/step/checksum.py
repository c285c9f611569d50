"""Checksums of tensors on their devices, without a wait of the host."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_ROW = 4096  # words that one number replaces
_SEED = 0x5EED


def checksum(tensor: Tensor) -> Tensor:
    """Returns a checksum of the values and their order, an int64 scalar on the tensor's device.

    A sum of 64-bit words with random odd factors (multiply-shift hashing, Dietzfelbinger et al.
    1997) replaces each row of words, and rows of sums are summed in the same way. Unlike a digest
    it takes operators that every device has. Shape and dtype do not count.

    Args:
        tensor: strided tensor with memory, of any dtype.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    own = plain.contiguous().reshape(-1).view(torch.uint8)
    words = own.new_zeros(-(-own.numel() // 8) * 8)
    words[: own.numel()] = own
    words = words.view(torch.int64)
    level = 0
    while level == 0 or words.numel() > 1:
        num_rows = max(-(-words.numel() // _ROW), 1)
        size = min(words.numel(), _ROW)
        padded = words
        if num_rows > 1 and words.numel() % _ROW:
            padded = words.new_zeros(num_rows * _ROW)
            padded[: words.numel()] = words
        factors = _factors(tensor.device, level)[:size]
        words = (padded.view(num_rows, size) * factors).sum(1)
        level += 1
    return words[0]


@functools.cache
def _factors(device: torch.device, level: int) -> Tensor:
    """Returns odd numbers that are equal on all ranks."""
    generator = torch.Generator("cpu").manual_seed(_SEED + level)
    halves = torch.randint(2**31, (2, _ROW), generator=generator, device="cpu")
    return ((halves[0] << 32) ^ (halves[1] << 1) ^ 1).to(device)
