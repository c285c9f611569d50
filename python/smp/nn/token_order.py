"""The order of tokens in products with split layers.

A gather puts the parts of the ranks side by side, one after the other. Where ranks have parts of
each sequence, the tokens of a sample are then apart from each other, and a copy of the whole tensor
would bring them together. Linear layers, biases and activation functions treat each token alone, so
between a column and the row that it feeds tokens stay as they were gathered. Only code that looks
at sequences, as attention does, has them put in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenOrder:
    """The order in which the tokens of all ranks lie after a gather: *blocks* ``[c, t, b, s, *]``.

    A rank's part ``[B, S', *]`` is gathered in ``c`` pieces, each of them from all ``t`` ranks. The
    pieces cut the samples, or the positions where there is one sample.

    Attributes:
        dim: dim of ``[all B, all S]`` along which ranks have parts: 0 (samples) or 1 (sequence).
        num_ranks: the tensor-parallel degree.
        part: numbers of samples and of positions in a rank's part, ``(B, S')``.
        num_pieces: number of pieces; divides what they cut.
    """

    dim: int
    num_ranks: int
    part: tuple[int, int]
    num_pieces: int = 1

    @property
    def _piece(self) -> tuple[int, int]:
        """Returns the numbers of samples and of positions in a piece of one rank."""
        samples, positions = self.part
        if samples > 1:
            return samples // self.num_pieces, positions
        return samples, positions // self.num_pieces

    @property
    def _axes(self) -> tuple[list[int], list[int]]:
        """Returns the dims of blocks that samples consist of, and those of positions."""
        axes = [2], [3]
        axes[0 if self.part[0] > 1 else 1].insert(0, 0)
        axes[self.dim].insert(0, 1)
        return axes

    def parts(self, x: Tensor) -> Tensor:
        """Returns this rank's part ``[B, S', *]`` as pieces ``[c, 1, b, s, *]``, a view."""
        return x.reshape(self.num_pieces, 1, *self._piece, *x.shape[2:])

    def own(self, x: Tensor) -> Tensor:
        """Reverses `parts`."""
        return x.reshape(*self.part, *x.shape[4:])

    def sorted(self, x: Tensor) -> Tensor:
        """Returns blocks as ``[all B, all S, *]``; copies them unless they lie so already."""
        samples, positions = self._axes
        moved = x.permute(*samples, *positions, *range(4, x.dim()))
        extents = [math.prod(x.shape[axis] for axis in axes) for axes in self._axes]
        return moved.reshape(*extents, *x.shape[4:])

    def blocks(self, x: Tensor) -> Tensor:
        """Reverses `sorted`; the result is contiguous."""
        samples, positions = self._axes
        axes = samples + positions
        sizes = (self.num_pieces, self.num_ranks, *self._piece)
        split = x.reshape(*(sizes[axis] for axis in axes), *x.shape[2:])
        back = [axes.index(axis) for axis in range(4)]
        return split.permute(*back, *range(4, split.dim())).contiguous()
