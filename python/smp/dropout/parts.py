"""Finds the part of a tensor that a rank has inside of a block that a plan splits.

Between a column and the row that it feeds activations are split, elsewhere they are common. The
shape of a tensor shows which part of the whole it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smp.dropout.masks import Slice


class Share(NamedTuple):
    """A rank's share of heads or features: their number, the first one, and the total."""

    own: int
    begin: int
    extent: int

    @classmethod
    def of(cls, sizes: Sequence[int], rank: int) -> Share:
        """Returns the share of a rank, given the numbers of all."""
        return cls(sizes[rank], sum(sizes[:rank]), sum(sizes))


class Block:
    """The state, on one rank, of a single call of a block.

    Attributes:
        heads: share of query heads that this rank has; None unless columns of attention ran last.
        columns: shares of the features of columns that ran, by number of features.
        width: number of features that enter the columns.
        is_split: whether columns have run, and no row has since.
    """

    __slots__ = ("columns", "heads", "is_split", "width")

    def __init__(self) -> None:
        self.heads: Share | None = None
        self.columns: dict[int, Share] = {}
        self.width = 0
        self.is_split = False

    def copy(self) -> Block:
        """Returns a copy of the state."""
        made = Block()
        made.take_over(self)
        return made

    def take_over(self, other: Block) -> None:
        """Takes the state that a copy has reached."""
        self.heads, self.columns = other.heads, dict(other.columns)
        self.width, self.is_split = other.width, other.is_split

    def part_of(self, shape: Sequence[int], num_samples: int) -> tuple[Slice | None, str]:
        """Returns the part of the whole that a tensor of this shape is.

        Args:
            shape: shape of the tensor: samples first, or several rows for each sample.
            num_samples: number of samples in the tensor.

        Returns:
            the part (None: it is common); and the reason why it cannot be found, or "".
        """
        column = self.columns.get(shape[-1])
        if not self.is_split:
            if column is not None and shape[-1] != self.width:
                return None, "it is as wide as a part, behind the row that sums the parts"
            return None, ""
        heads = self.heads
        if heads is not None and len(shape) == 4 and shape[1] == heads.own:
            return Slice(1, heads.begin, heads.extent), ""
        if heads is not None and len(shape) == 3 and shape[0] == num_samples * heads.own:
            # With one head on this rank, features look like its row.
            if heads.own > 1 or column is None:
                return Slice(0, heads.begin, heads.extent), ""
            if shape[1] == shape[2]:
                return None, "the probabilities of one head and its features have this shape"
        if column is not None:
            return Slice(len(shape) - 1, column.begin, column.extent), ""
        return None, "between a column and its row, and it has the shape of no part that is known"
