"""What one call of a block remembers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from smp.tensor_parallel import regions


class _Calls(threading.local):
    """Blocks that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.copies: list[dict[int, tuple[Tensor, int, Tensor]]] = []


_calls = _Calls()


@contextmanager
def call_of_block() -> Iterator[None]:
    """Columns that are called inside share what they read."""
    _calls.copies.append({})
    try:
        yield
    finally:
        _calls.copies.pop()


def for_columns(x: Tensor) -> Tensor:
    """A common tensor as columns read it: gradients that come back are summed over the ranks.

    Columns of one call of a block that read the same tensor sum once for all of them.
    """
    if not _calls.copies or type(x) is not Tensor:
        return regions.copy(x)
    known = _calls.copies[-1]
    kept = known.get(id(x))
    if kept is not None and kept[1] == x._version:
        return kept[2]
    copied = regions.copy(x)
    known[id(x)] = (x, x._version, copied)  # which keeps it, and so its id
    return copied
