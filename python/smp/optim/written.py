"""Notices writes, other than updates, to the tensors that an optimizer updates."""

from __future__ import annotations

from typing import Any

import torch

import smp._C as _C
from smp.optim.masters import holdings_of


class WrittenMasters:
    """Version counters of the masters and pieces of one optimizer.

    Modules and other ranks have copies of these, which an update spreads. Two others write to them,
    too: an optimizer that exchanges two sets of values (schedule-free ones, averages of weights),
    and a script.

    Args:
        optimizer: optimizer of torch, with masters in its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._holdings = holdings_of(optimizer)
        self._masters = [holding.master for holding in self._holdings]
        self.note()

    def note(self) -> None:
        """Notes that all copies are up to date."""
        self._versions = [master._version for master in self._masters]

    def is_new(self) -> bool:
        """Returns whether the tensors of ``param_groups`` were written to since the last note.

        Raises:
            RuntimeError: a tensor was given other memory.
        """
        for holding in self._holdings:
            is_elsewhere = holding.master.data_ptr() != holding.piece.data_ptr()
            if is_elsewhere and holding.numel and not holding.has_copy:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the optimizer's part of parameter '{holding.name}' was "
                    "given other memory (parameter.data = ...), which modules and other ranks "
                    "cannot see; write to its present memory: parameter.data.copy_(...)"
                )
        return self._versions != [master._version for master in self._masters]

    def digest(self) -> Any:
        """Returns a digest of the values; ``tensor.data`` has a version counter of its own."""
        self.is_new()
        with torch.no_grad():
            sums = [master.view(_INTEGERS[master.itemsize]).sum() for master in self._masters]
            return [int(each) for each in torch.stack(sums).tolist()] if sums else []


_INTEGERS = {4: torch.int32, 8: torch.int64}
