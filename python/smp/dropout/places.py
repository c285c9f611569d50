"""Identifies the place in a model where a mask is drawn, independently of the layout.

A place is one call of one module: the module, the number of the call among those of the module
around it, and so on up to the step function. Masks are counted per place. The place of the running
code is in a context variable, so that each microbatch and each call for another rank has its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

import smp._C as _C
from smp.dropout.batches import BatchTable, Samples
from smp.dropout.masks import Slice, mixed, scaled, stays
from smp.dropout.parts import Block

KEY = "layout_independent_dropout"


class Place:
    """The place of one call of a module.

    Args:
        key: hash of the module, the call's number, and the key of the place around it.
        samples: samples that the call computes with.
        name: name of the module, for errors.
        dim: dim of tensors along which samples lie; None: not known.
        split_by: name of the surrounding module that is split over ranks in a way that the library
            cannot follow.
        of_group: whether tensors have the samples of all ranks of the tensor-parallel group.
        block: surrounding block that a plan splits.
    """

    __slots__ = (
        "block",
        "calls",
        "dim",
        "key",
        "name",
        "num_drawn",
        "of_group",
        "samples",
        "split_by",
    )

    def __init__(
        self,
        key: int,
        samples: Samples,
        name: str = "",
        dim: int | None = 0,
        split_by: str | None = None,
        of_group: bool = False,
        block: Block | None = None,
    ) -> None:
        self.block = block
        self.key, self.samples, self.name, self.dim = key, samples, name, dim
        self.split_by, self.of_group = split_by, of_group
        self.num_drawn = 0
        self.calls: dict[int, int] = {}

    def copy(self) -> Place:
        """Returns a copy of the place, whose counters are its own."""
        made = Place(self.key, self.samples, self.name, self.dim, self.split_by, self.of_group)
        made.num_drawn, made.calls = self.num_drawn, dict(self.calls)
        made.block = None if self.block is None else self.block.copy()
        return made

    def take_over(self, other: Place) -> None:
        """Takes the counters that a copy has reached."""
        self.num_drawn, self.calls = other.num_drawn, dict(other.calls)
        if self.block is not None and other.block is not None:
            self.block.take_over(other.block)

    def count_call(self, module_key: int) -> int:
        """Returns the number of earlier calls of a module in this place, and counts this one."""
        number = self.calls.get(module_key, 0)
        self.calls[module_key] = number + 1
        return number

    def drop(
        self, x: Tensor, p: float, part: Slice | None = None, of_group: bool | None = None
    ) -> Tensor:
        """Returns ``x`` with some elements 0, and the others divided by ``1 - p``.

        Args:
            x: ``[samples, *]``, or several consecutive rows for each sample.
            p: probability that an element is dropped, in (0, 1].
            part: part of the whole tensor that this rank has, if not all.
            of_group: whether tensors have the samples of all ranks of the tensor-parallel group;
                None: the value of this place.
        """
        if p >= 1.0:
            return x * 0.0
        return scaled(x, self.mask_of(x, p, part, of_group), 1.0 / (1.0 - p))

    def mask_of(
        self, x: Tensor, p: float, part: Slice | None = None, of_group: bool | None = None
    ) -> Tensor:
        """Returns the mask of a tensor's kept elements, samples along `dim`; counts as a draw."""
        dim = self.dim if part is None else 0
        if not dim or x.dim() <= dim:
            return self.mask(x, x.shape, p, part, of_group)
        turned = x.transpose(0, dim)
        return self.mask(x, turned.shape, p, part, of_group).transpose(0, dim)

    def mask(
        self,
        x: Tensor,
        shape: Sequence[int],
        p: float,
        part: Slice | None = None,
        of_group: bool | None = None,
    ) -> Tensor:
        """Returns the mask of the kept elements of a tensor of this shape; counts as a draw.

        Raises:
            RuntimeError: the samples in the tensor cannot be found.
        """
        self._check(x, knows_part=part is not None)
        ids = self.samples.ids(self.of_group if of_group is None else of_group)
        if not shape or not ids or shape[0] % len(ids):
            raise self.refused(
                x,
                f"expected {len(ids)} samples along dim {self.dim}, or as many rows for each of "
                "them, one sample after the other",
                "keep samples there",
            )
        if part is None and self.block is not None:
            part, why = self.block.part_of(shape, len(ids))
            if why:
                raise self.refused(
                    x, why, "set its dropout to 0, or leave its layers out of the plan"
                )
        key = mixed(self.key, self.samples.seed, self.num_drawn)
        self.num_drawn += 1
        sizes = list(shape[1:])
        if shape[0] != len(ids) or (part is not None and part.dim == 0):
            sizes.insert(0, shape[0] // len(ids))
            part = None if part is None else part._replace(dim=part.dim + 1)
        return stays(key, ids, sizes, p, x.device, part).view(tuple(shape))

    def _check(self, x: Tensor, *, knows_part: bool) -> None:
        if self.samples.why_not:
            raise self.refused(x, *self.samples.why_not.split("; ", 1))
        if self.dim is None:
            raise self.refused(
                x,
                "the arguments of the step function have samples along several dims, so that of "
                "this tensor cannot be told",
                "give all of them samples along one dim",
            )
        if isinstance(x, nn.Parameter):
            raise self.refused(
                x, "a parameter has no samples", "drop elements of activations instead"
            )
        if self.split_by is not None and not knows_part:
            raise self.refused(
                x,
                f"it is inside of '{self.split_by}', which is split over ranks, so that it is not "
                "known which elements of the whole tensor are here",
                "set its dropout to 0, or leave the module whole "
                "(smp.set_tensor_parallelism(module, False))",
            )

    def refused(self, x: Tensor, why: str, what_to_do: str) -> RuntimeError:
        """Returns the error to raise where a mask would depend on the layout."""
        where = f"module '{self.name}'" if self.name else "the step function"
        return RuntimeError(
            f"{_C.rank_prefix()}{KEY}: dropout of a tensor of shape {list(x.shape)} in {where}: "
            f"{why}. To go on: {what_to_do}; or leave {KEY} out"
        )


_place: contextvars.ContextVar[Place | None] = contextvars.ContextVar("smp_place", default=None)


def current() -> Place | None:
    """Returns the place of the running code, or None where masks are PyTorch's."""
    return _place.get()


def enter(place: Place | None) -> contextvars.Token[Place | None]:
    """Sets the place of the running code, until `leave`."""
    return _place.set(place)


def leave(token: contextvars.Token[Place | None]) -> None:
    """Restores the place before `enter`."""
    _place.reset(token)


@contextlib.contextmanager
def at(place: Place | None) -> Iterator[None]:
    """Runs the block in a place."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def key_of(name: str) -> int:
    """Returns a number for a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def refusing(why: str, what_to_do: str) -> Place:
    """Returns a place where any draw is an error."""
    samples = Samples(BatchTable(0, ()), (), 0, 0, f"{why}; {what_to_do}")
    return Place(0, samples)


# ---- a second run ----------------------------------------------------------------------


class RepeatedRun:
    """Lets a function run twice at one place, with the masks of its first run.

    Made before the first run; code after both runs counts on from the end of the first.
    """

    def __init__(self) -> None:
        self._place = _place.get()
        self._start = None if self._place is None else self._place.copy()

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Sets the place for one of the runs."""
        if self._start is None:
            yield
            return
        place = self._start.copy()
        with at(place):
            yield
        if self._place is not None:
            self._place.take_over(place)
            self._place = None


# ---- calls for other ranks -------------------------------------------------------------


class SentPlace(NamedTuple):
    """A place that travels with a call to another rank; the same in all microbatches."""

    key: int
    name: str
    dim: int | None
    split_by: str | None
    of_group: bool
    num_drawn: int
    calls: tuple[tuple[int, int], ...]


def depart(module_keys: Sequence[int], draws: bool = False) -> SentPlace | None:
    """Returns the place that travels with a call, and counts the call.

    Args:
        module_keys: keys of the modules that are called; empty for a function.
        draws: whether the function draws a mask.
    """
    place = _place.get()
    if place is None:
        return None
    calls = tuple((key, place.count_call(key)) for key in module_keys)
    told = SentPlace(
        place.key, place.name, place.dim, place.split_by, place.of_group, place.num_drawn, calls
    )
    place.num_drawn += draws
    return told


def arrive(told: SentPlace | None, samples_of: Callable[[], Samples]) -> Place | None:
    """Returns the place of a caller on another rank.

    Args:
        told: place that came with the call.
        samples_of: returns the samples of the microbatch.
    """
    if told is None:
        return None
    place = Place(told.key, samples_of(), told.name, told.dim, told.split_by, told.of_group)
    place.num_drawn, place.calls = told.num_drawn, dict(told.calls)
    return place
