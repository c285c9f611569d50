"""Describes the elements of a whole tensor that a rank has. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp.tensor_parallel.sharding import Interval


@dataclass(frozen=True)
class Part:
    """Elements of a tensor that one rank holds.

    The tensor is seen with sizes ``view``. The slice is ``[begin, end)`` of its dim ``dim``, which
    has ``extent`` indices (dim -1: the flattened tensor). The elements are ``[flat_begin,
    flat_begin + flat_numel)`` of that slice, flattened row-major.

    Attributes:
        view: None for the tensor's own sizes; otherwise sizes, of equal numel, with rows in groups
            (query, key and value in one matrix, each cut alike: ``(3, n, k)`` cut at dim 1).
    """

    dim: int
    begin: int
    end: int
    extent: int
    flat_begin: int
    flat_numel: int
    view: tuple[int, ...] | None = None

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Part:
        return cls.flat(shape, 0, math.prod(shape))

    @classmethod
    def flat(cls, shape: Iterable[int], begin: int, numel: int) -> Part:
        """Returns ``numel`` elements of the flattened tensor, from ``begin`` on."""
        extent = math.prod(shape)
        return cls(-1, 0, extent, extent, begin, numel)

    @classmethod
    def share(cls, shape: Iterable[int], idx: int, num_parts: int) -> Part:
        """Returns an equal part of the flattened tensor; parts at its end are smaller or empty."""
        numel = math.prod(sizes := tuple(shape))
        step = -(-numel // num_parts)
        begin = min(numel, idx * step)
        return cls.flat(sizes, begin, min(step, numel - begin))

    @classmethod
    def of_slice(
        cls, shape: Sequence[int], slice_: Interval | None, begin: int, numel: int
    ) -> Part:
        """Returns elements of the flattened slice of a dim.

        Args:
            shape: shape of the slice.
            slice_: the slice; None: the whole tensor.
            begin: first element.
            numel: number of elements.
        """
        if slice_ is None or slice_.size == slice_.extent:
            return cls.flat(shape, begin, numel)
        view = getattr(slice_, "view", None)
        return cls(slice_.dim, slice_.begin, slice_.end, slice_.extent, begin, numel, view)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises a ValueError if this is no part of a tensor of sizes ``shape``."""
        view = shape if self.view is None else self.view
        if math.prod(view) != math.prod(shape):
            raise ValueError(f"seen as {list(view)}, but the tensor is {list(shape)}")
        if not -1 <= self.dim < len(view):
            raise ValueError(f"dim {self.dim} of a tensor of sizes {list(view)}")
        extent = math.prod(view) if self.dim == -1 else view[self.dim]
        if self.extent != extent or not 0 <= self.begin <= self.end <= extent:
            raise ValueError(f"[{self.begin}, {self.end}) of {self.extent} where {extent} are")
        numel = math.prod(self.sizes_of_slice(view))
        if not 0 <= self.flat_begin <= self.flat_begin + self.flat_numel <= numel:
            raise ValueError(
                f"elements [{self.flat_begin}, {self.flat_begin + self.flat_numel}) of {numel}"
            )

    def sizes_of_slice(self, view: Sequence[int]) -> list[int]:
        """Returns the sizes of the slice; ``view`` has those of the whole tensor."""
        size = self.end - self.begin
        return [size] if self.dim == -1 else [*view[: self.dim], size, *view[self.dim + 1 :]]
