"""What one call of a block remembers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from smp.nn.planned.late import LateSum
from smp.tensor_parallel import regions


class Call:
    """One call of a block.

    Attributes:
        sums_late: its rows may leave their sums to whom reads them.
    """

    def __init__(self, sums_late: bool = False) -> None:
        self.sums_late = sums_late
        # By the id of a tensor that is kept: itself, its version, and what belongs to it.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._origins: dict[int, tuple[Tensor, int, Tensor]] = {}

    def note(self, whole: Tensor, own: Tensor) -> None:
        """`whole` was gathered of `own`, along dim 0."""
        self._origins[id(whole)] = (whole, whole._version, own)

    def for_columns(self, x: Tensor) -> Tensor:
        """See the function of this name."""
        kept = self._copies.get(id(x))
        if kept is not None and kept[1] == x._version:
            return kept[2]
        origin = self._origins.get(id(x))
        if origin is not None and origin[1] == x._version:
            copied = regions.gathered(origin[2], x)
        else:
            copied = regions.copy(x)
        self._copies[id(x)] = (x, x._version, copied)
        return copied


class _Calls(threading.local):
    """Blocks that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.running: list[Call] = []


_calls = _Calls()


@contextmanager
def call_of_block(call: Call) -> Iterator[None]:
    """Columns that are called inside share what they read."""
    _calls.running.append(call)
    try:
        yield
    finally:
        _calls.running.pop()


def sums_late() -> bool:
    """May the row that asks leave its sum to whom reads it?"""
    return bool(_calls.running) and _calls.running[-1].sums_late


def for_columns(x: Tensor) -> Tensor:
    """A common tensor as columns read it: gradients that come back are summed over the ranks.

    Columns of one call of a block that read the same tensor sum once for all of them. Where this is
    an argument that the block has gathered, each rank gets its own part of the sum only.
    """
    if isinstance(x, LateSum):
        x = x.read()
    if not _calls.running or type(x) is not Tensor:
        return regions.copy(x)
    return _calls.running[-1].for_columns(x)
