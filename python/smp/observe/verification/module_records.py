"""Records outputs of modules by microbatch, and which modules draw random numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.modules.forwards import Forward
from smp.modules.tracing import is_tracing
from smp.observe.first_step.records import Records, leaves_of
from smp.observe.first_step.sketch import SIZE, is_plain, sketch

#: shape, and numbers or their sketch; None for values without numbers
Row = tuple[tuple[int, ...], Tensor] | None


class ModuleRecords(Records):
    """Sketches of the outputs of modules, by microbatch.

    Args:
        names: names of the modules.
        notes_draws: record which modules draw random numbers; only where one thread runs at a time.

    Attributes:
        rows: outputs by microbatch, name and number of the call in it, in the order in which
            modules returned.
        draws: modules that drew random numbers, with their class; inner ones first.
    """

    def __init__(self, names: list[str], notes_draws: bool) -> None:
        super().__init__(lambda: self.is_on and not is_tracing() and _C.current_microbatch() >= 0)
        self._names = names
        self._notes_draws = notes_draws
        self._numbers: dict[tuple[int, int], int] = {}
        self.is_on = False
        self.rows: dict[tuple[int, str, int], list[Row]] = {}
        self.draws: dict[str, None] = {}

    def around(self, idx: int, forward: Forward) -> Forward:
        recorded = super().around(idx, forward)
        if not self._notes_draws:
            return recorded

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = torch.get_rng_state()
            result = recorded(*args, **kwargs)
            if self.is_on and not torch.equal(before, torch.get_rng_state()):
                self.draws.setdefault(self._names[idx])
            return result

        return functools.update_wrapper(watched, forward)

    def _note(self, idx: int, result: Any) -> None:
        mb = _C.current_microbatch()
        number = self._numbers.get((mb, idx), 0)
        self._numbers[mb, idx] = number + 1
        self.rows[mb, self._names[idx], number] = [row_of(leaf) for leaf in leaves_of(result)]

    def take(self) -> dict[tuple[int, str, int], list[Row]]:
        """Returns the rows of a step and clears them."""
        rows, self.rows = self.rows, {}
        self._numbers.clear()
        return rows


def row_of(value: Any) -> Row:
    """Returns the row of a leaf: its numbers, or a sketch if there are many."""
    if not is_plain(value):
        return None
    if value.numel() <= SIZE and not value.is_complex():
        return tuple(value.shape), value.detach().reshape(-1).to("cpu", torch.float64, copy=True)
    return tuple(value.shape), sketch(value).cpu()
