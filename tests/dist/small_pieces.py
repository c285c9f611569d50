"""Moments of small models in host memory, for `offload_optimizer_state`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from smp.modules import state_bytes
from smp.optim.host_moments import MomentSlots


@contextmanager
def small_pieces() -> Iterator[list[int]]:
    """Puts moments of any size into host memory, in pieces of two blocks.

    Yields:
        the number of pieces of each update, a list that grows.
    """
    numbers: list[int] = []
    update = MomentSlots.update

    def counted(slots: MomentSlots, pieces: Sequence[Any], run: Callable[[Any], None]) -> None:
        numbers.append(len(pieces))
        for piece in pieces:
            for state in piece.states:
                assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "cpu"
        update(slots, pieces, run)

    with (
        mock.patch.object(state_bytes, "LEAST_AWAY_ELEMENTS", 1),
        mock.patch.object(state_bytes, "PIECE_ELEMENTS", 2 * state_bytes.BLOCK),
        mock.patch.object(MomentSlots, "update", counted),
    ):
        yield numbers
