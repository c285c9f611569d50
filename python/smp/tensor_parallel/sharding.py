"""Which part of a parameter this rank holds, and over which ranks its gradient is summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

import smp._C as _C
from smp.tensor_parallel import regions


@dataclass(frozen=True)
class PackedInterval:
    """A slice of a tensor with several matrices in one dim, of each of which it has the same part.

    Attributes:
        view: sizes of the whole tensor, with that dim as two: how many matrices, and their size.
        dim: of the view, along which it is cut.
        begin, end, extent: of that dim.
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
        """Of the whole tensor."""
        dim = self.dim - 1
        return [*self.view[:dim], self.view[dim] * self.extent, *self.view[self.dim + 1 :]]

    def counted(self) -> _C.ShardInterval:
        """An interval of the tensor's own dim with as many elements, for what only counts them."""
        num = self.view[self.dim - 1]
        bounds = (num * self.begin, num * self.end, num * self.extent)
        return _C.ShardInterval(self.dim - 1, *bounds)


Interval: TypeAlias = "_C.ShardInterval | PackedInterval"


@dataclass(frozen=True)
class Placement:
    """Of a parameter of a distributed module.

    Attributes:
        interval: the slice held here; None if all of it is.
        partial: its gradient here covers only the part of the activations that is on this rank, so
            it is summed over the tensor-parallel ranks as well.
    """

    interval: Interval | None
    partial: bool = False


# Attributes of parameters. Weak references to them would forbid what makes meta parameters real.
_PLACEMENT = "_smp_placement"
_REPLACED = "_smp_replaced"
_JOINED = "_smp_joined"


def split(extent: int, num_parts: int | None = None) -> list[int]:
    """Sizes of the parts of something that is cut as evenly as possible, larger ones first.

    Args:
        extent: what is cut.
        num_parts: into how many; the tensor-parallel degree if not given.
    """
    parts = regions.size() if num_parts is None else num_parts
    return [extent // parts + (idx < extent % parts) for idx in range(parts)]


def begin_of(sizes: Sequence[int], rank: int | None = None) -> int:
    """Where the part of a tensor-parallel rank begins; of this one if none is given."""
    return sum(sizes[: regions.rank() if rank is None else rank])


def mark_split(parameter: nn.Parameter, dim: int, begin: int, extent: int) -> None:
    """Says that a parameter is the slice from ``begin`` on of a dim of size ``extent``."""
    size = parameter.shape[dim]
    interval = _C.ShardInterval(dim, begin, begin + size, extent)
    setattr(parameter, _PLACEMENT, Placement(interval))


def mark_packed(parameter: nn.Parameter, dim: int, num: int, begin: int, extent: int) -> None:
    """Says that a parameter is the slice from ``begin`` on of each of several packed matrices.

    Args:
        parameter: ``[..., num * own size, ...]``.
        dim: in which the matrices lie behind each other.
        num: how many there are.
        begin, extent: of one of them.
    """
    shape = parameter.shape
    size = shape[dim] // num
    view = (*shape[:dim], num, extent, *shape[dim + 1 :])
    interval = PackedInterval(view, dim + 1, begin, begin + size, extent)
    setattr(parameter, _PLACEMENT, Placement(interval))


def mark_whole(parameter: nn.Parameter, *, partial: bool) -> None:
    """Says that a parameter of a distributed module is held whole by every rank.

    Args:
        parameter: of the module, registered.
        partial: it is applied to a part of the group's activations on each rank, so that its
            gradients are parts of a sum.
    """
    setattr(parameter, _PLACEMENT, Placement(None, partial))


def placement_of(parameter: Tensor) -> Placement | None:
    """None for parameters of modules that are not distributed."""
    placement = getattr(parameter, _PLACEMENT, None)
    assert placement is None or isinstance(placement, Placement)
    return placement


def interval_of(parameter: Tensor) -> Interval | None:
    """The slice that this rank holds; None for a parameter that every rank holds whole."""
    placement: Placement | None = getattr(parameter, _PLACEMENT, None)
    return None if placement is None else placement.interval


def is_complete(parameter: Tensor) -> bool:
    """Does a distributed module hold all of it, with a gradient that is complete on each rank?"""
    placement = placement_of(parameter)
    return placement is not None and placement.interval is None and not placement.partial


def mark_joined(parameter: nn.Parameter) -> None:
    """Says that code of its module joins its part with activations that are split alike."""
    setattr(parameter, _JOINED, True)


def is_joined(parameter: Tensor) -> bool:
    """Whether `mark_joined` was called."""
    return hasattr(parameter, _JOINED)


def dim_of(interval: Interval | None) -> int | None:
    """The dim of the parameter itself along which an interval cuts it; None if it is whole."""
    if isinstance(interval, PackedInterval):
        return interval.dim - 1
    return None if interval is None else interval.dim


def whole_shape(parameter: Tensor) -> list[int]:
    """Shape of the parameter that this rank holds a part of."""
    shape = list(parameter.shape)
    interval = interval_of(parameter)
    if isinstance(interval, PackedInterval):
        return interval.shape
    if interval is not None:
        shape[interval.dim] = interval.extent
    return shape


def slice_of(whole: Tensor, interval: Interval | None) -> Tensor:
    """The slice that an interval names, a view; a copy of packed ones."""
    if interval is None:
        return whole
    if isinstance(interval, PackedInterval):
        seen = whole.reshape(interval.view).narrow(interval.dim, interval.begin, interval.size)
        return seen.flatten(interval.dim - 1, interval.dim)
    return whole.narrow(interval.dim, interval.begin, interval.size)


def mark_replaced(parameter: nn.Parameter, name: str) -> None:
    """Says that a distributed module has taken the place of the one that held a parameter."""
    setattr(parameter, _REPLACED, name)


def replaced_name(parameter: Tensor) -> str | None:
    """The former name of a parameter that was replaced; None for others."""
    name = getattr(parameter, _REPLACED, None)
    assert name is None or isinstance(name, str)
    return name
