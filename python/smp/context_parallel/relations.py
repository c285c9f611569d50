"""The relation of tensors of a part of the tokens to those of the whole, as trials see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smp.context_parallel import regions

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_OF_16_BITS = 3e-2  # of norms; the same products with other numbers of rows differ by rounding


class Different(Exception):
    """A part gives other numbers than the whole; the text is the end of a sentence."""


@dataclass(frozen=True)
class Leaf:
    """The relation of a tensor of a part to the one of the whole.

    Attributes:
        dim: dim along which it is a part; None: all ranks have the same.
        is_flat: whether the dim has the tokens of all samples, one after the other.
        most: largest number of tokens that are left, the last ones; None: all.
    """

    dim: int | None
    is_flat: bool = False
    most: int | None = None

    def part_of(self, whole: Tensor, length: int) -> Tensor:
        """Returns what a whole tensor of this rank's part would be."""
        if self.dim is None:
            return whole
        if self.is_flat:
            return regions.own(length).of(whole.unflatten(0, (-1, length)), 1).flatten(0, 1)
        return regions.own(length).of(whole, self.dim)


@dataclass
class Pair:
    """A tensor of a run with all tokens, beside that of a run with a part of them."""

    whole: Tensor
    part: Tensor
    leaf: Leaf


def is_close(part: Tensor, whole: Tensor, times: float = 1.0) -> bool:
    """Returns whether numbers are the same but for rounding.

    It is measured by norms of the last dim: of many tokens few may differ, at the border of a part.

    Args:
        part, whole: tensors.
        times: number of times that rounding may be larger than in a forward.
    """
    if part.shape != whole.shape or part.dtype != whole.dtype:
        return False
    if not part.is_floating_point():
        return bool(torch.equal(part, whole))
    a, b = (torch.nan_to_num(x.double(), nan=0.0, posinf=0.0, neginf=0.0) for x in (part, whole))
    tolerance = times * _TOLERANCES.get(part.dtype, _OF_16_BITS)
    is_same_nan = torch.equal(part.isfinite(), whole.isfinite())
    if not is_same_nan or b.numel() == 0:
        return is_same_nan
    norms = b.norm(dim=-1) if b.dim() else b.abs()
    differences = (a - b).norm(dim=-1) if b.dim() else (a - b).abs()
    # A token of small numbers, beside which there are larger ones, has their rounding.
    return bool((differences <= tolerance * (norms + norms.flatten().median())).all())


def leaf_of(part: Tensor, whole: Tensor, length: int, what: str, times: float = 1.0) -> Leaf:
    """Returns how a part belongs to its whole.

    Args:
        part, whole: tensors.
        length: number of tokens of the whole.
        what: words for the error.
        times: see `is_close`.

    Raises:
        Different: it does not.
    """
    own = regions.own(length)
    if is_close(part, whole, times):
        return Leaf(None)
    dims = [d for d in range(whole.dim()) if part.dim() == whole.dim()]
    for dim in (d for d in dims if part.shape[d] != whole.shape[d]):
        if whole.shape[dim] == length and is_close(part, own.of(whole, dim), times):
            return Leaf(dim)
        if dim == 0 and whole.shape[0] % length == 0:
            apart = own.of(whole.unflatten(0, (-1, length)), 1).flatten(0, 1)
            if is_close(part, apart, times):
                return Leaf(0, is_flat=True)
    raise Different(f"{what} is another one for a part of the tokens, which its code mixes")
