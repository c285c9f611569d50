"""Records the part of a parameter that this rank holds, and the ranks that sum its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

import smp._C as _C
from smp.tensor_parallel import regions


@dataclass(frozen=True)
class PackedInterval:
    """A slice of a tensor with several matrices in one dim: the same part of each matrix.

    Attributes:
        view: sizes of the whole tensor, with that dim as two: number of matrices, and their size.
        dim: dim of the view along which it is cut.
        begin, end, extent: range of that dim, and its size.
    """

    view: tuple[int, ...]
    dim: int
    begin: int
    end: int
    extent: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        dim = self.dim - 1
        return [*self.view[:dim], self.view[dim] * self.extent, *self.view[self.dim + 1 :]]

    def counted(self) -> _C.ShardInterval:
        """Returns an interval of the tensor's own dim with as many elements, for counting."""
        num = self.view[self.dim - 1]
        bounds = (num * self.begin, num * self.end, num * self.extent)
        return _C.ShardInterval(self.dim - 1, *bounds)


Interval: TypeAlias = "_C.ShardInterval | PackedInterval"


@dataclass(frozen=True)
class Placement:
    """The placement of a parameter of a distributed module.

    Attributes:
        interval: the slice held on this rank; None for the whole.
        partial: whether its gradient covers only this rank's part of the activations, so that it
            is summed over the tensor-parallel ranks as well.
    """

    interval: Interval | None
    partial: bool = False


# Attributes of parameters. Weak references would prevent meta parameters from becoming real.
_PLACEMENT = "_smp_placement"
_REPLACED = "_smp_replaced"
_JOINED = "_smp_joined"


def split(extent: int, num_parts: int | None = None) -> list[int]:
    """Returns the sizes of parts that are as even as possible, larger ones first.

    Args:
        extent: size to cut.
        num_parts: number of parts; the tensor-parallel degree if not given.
    """
    parts = regions.size() if num_parts is None else num_parts
    return [extent // parts + (idx < extent % parts) for idx in range(parts)]


def begin_of(sizes: Sequence[int], rank: int | None = None) -> int:
    """Returns the first index of a tensor-parallel rank's part; this rank's if none is given."""
    return sum(sizes[: regions.rank() if rank is None else rank])


def mark_split(parameter: nn.Parameter, dim: int, begin: int, extent: int) -> None:
    """Marks a parameter as the slice from ``begin`` on of a dim of size ``extent``."""
    size = parameter.shape[dim]
    interval = _C.ShardInterval(dim, begin, begin + size, extent)
    setattr(parameter, _PLACEMENT, Placement(interval))


def mark_packed(parameter: nn.Parameter, dim: int, num: int, begin: int, extent: int) -> None:
    """Marks a parameter as the slice from ``begin`` on of each of several packed matrices.

    Args:
        parameter: ``[..., num * own size, ...]``.
        dim: dim in which the matrices follow each other.
        num: number of matrices.
        begin, extent: begin of the slice in each matrix, and the size of that matrix.
    """
    shape = parameter.shape
    size = shape[dim] // num
    view = (*shape[:dim], num, extent, *shape[dim + 1 :])
    interval = PackedInterval(view, dim + 1, begin, begin + size, extent)
    setattr(parameter, _PLACEMENT, Placement(interval))


def mark_whole(parameter: nn.Parameter, *, partial: bool) -> None:
    """Marks a parameter of a distributed module as held whole by every rank.

    Args:
        parameter: registered parameter of the module.
        partial: whether each rank applies it to a part of the group's activations, so that its
            gradients are parts of a sum.
    """
    setattr(parameter, _PLACEMENT, Placement(None, partial))


def placement_of(parameter: Tensor) -> Placement | None:
    """Returns the placement, or None for parameters of modules that are not distributed."""
    placement = getattr(parameter, _PLACEMENT, None)
    assert placement is None or isinstance(placement, Placement)
    return placement


def interval_of(parameter: Tensor) -> Interval | None:
    """Returns the slice that this rank holds; None for a parameter that every rank holds whole."""
    placement: Placement | None = getattr(parameter, _PLACEMENT, None)
    return None if placement is None else placement.interval


def is_complete(parameter: Tensor) -> bool:
    """Returns whether a distributed module holds a parameter whole, with complete gradients."""
    placement = placement_of(parameter)
    return placement is not None and placement.interval is None and not placement.partial


def mark_joined(parameter: nn.Parameter) -> None:
    """Marks a parameter whose module joins its part with activations that are split alike."""
    setattr(parameter, _JOINED, True)


def is_joined(parameter: Tensor) -> bool:
    """Returns whether `mark_joined` was called."""
    return hasattr(parameter, _JOINED)


def dim_of(interval: Interval | None) -> int | None:
    """Returns the dim of the parameter itself that an interval cuts; None if it is whole."""
    if isinstance(interval, PackedInterval):
        return interval.dim - 1
    return None if interval is None else interval.dim


def whole_shape(parameter: Tensor) -> list[int]:
    """Returns the shape of the whole parameter."""
    shape = list(parameter.shape)
    interval = interval_of(parameter)
    if isinstance(interval, PackedInterval):
        return interval.shape
    if interval is not None:
        shape[interval.dim] = interval.extent
    return shape


def slice_of(whole: Tensor, interval: Interval | None) -> Tensor:
    """Returns the slice that an interval names: a view, or a copy for packed matrices."""
    if interval is None:
        return whole
    if isinstance(interval, PackedInterval):
        seen = whole.reshape(interval.view).narrow(interval.dim, interval.begin, interval.size)
        return seen.flatten(interval.dim - 1, interval.dim)
    return whole.narrow(interval.dim, interval.begin, interval.size)


def mark_replaced(parameter: nn.Parameter, name: str) -> None:
    """Marks a parameter whose module a distributed one has replaced, with its former name."""
    setattr(parameter, _REPLACED, name)


def replaced_name(parameter: Tensor) -> str | None:
    """Returns the former name of a parameter that was replaced; None for others."""
    name = getattr(parameter, _REPLACED, None)
    assert name is None or isinstance(name, str)
    return name
