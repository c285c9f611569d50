"""State of one call of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from smp.nn.planned.late import LateSum
from smp.tensor_parallel import regions


class Call:
    """A call of a block.

    Attributes:
        sums_late: whether rows of the block may leave their sums to code that reads them.
    """

    def __init__(self, sums_late: bool = False) -> None:
        self.sums_late = sums_late
        # Keys are ids of tensors; values are the tensor, its version, and its copy or origin.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._origins: dict[int, tuple[Tensor, int, Tensor]] = {}

    def note(self, whole: Tensor, own: Tensor) -> None:
        """Records that `whole` was gathered from `own`, along dim 0."""
        self._origins[id(whole)] = (whole, whole._version, own)

    def for_columns(self, x: Tensor) -> Tensor:
        """Returns what the function of this name does."""
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
    """A stack of the blocks that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.running: list[Call] = []


_calls = _Calls()


@contextmanager
def call_of_block(call: Call) -> Iterator[None]:
    """Lets columns that are called inside share their inputs."""
    _calls.running.append(call)
    try:
        yield
    finally:
        _calls.running.pop()


def sums_late() -> bool:
    """Returns whether a row may leave its sum to code that reads it."""
    return bool(_calls.running) and _calls.running[-1].sums_late


def for_columns(x: Tensor) -> Tensor:
    """Returns a common tensor for columns to read; its gradients are summed over the ranks.

    Columns of one call of a block that read the same tensor share one sum. If the tensor is an
    argument that the block has gathered, each rank gets only its own part of the sum.
    """
    if isinstance(x, LateSum):
        x = x.read()
    if not _calls.running or type(x) is not Tensor:
        return regions.copy(x)
    return _calls.running[-1].for_columns(x)
