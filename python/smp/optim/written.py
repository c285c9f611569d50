"""Spreads what an optimizer or a script has written to masters and pieces."""

from __future__ import annotations

from typing import Any

import torch

import smp._C as _C
from smp.optim.masters import holdings_of


class WrittenMasters:
    """The masters and pieces of one optimizer, with their version counters.

    Modules and other ranks have copies of these, which an update spreads. Two others write to them,
    too: an optimizer that exchanges two sets of values (schedule-free ones, averages of weights),
    and a script.

    Args:
        optimizer: optimizer of torch, with masters in its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._holdings = holdings_of(optimizer)
        self._masters = [holding.master for holding in self._holdings]
        self._copied = [h for h in self._holdings if h.has_copy and h.numel]
        self._note()

    def _note(self) -> None:
        self._versions = [master._version for master in self._masters]

    def spread(self, are_written: bool) -> None:
        """Writes rounded masters to their copies in the model, which are up to date then.

        Args:
            are_written: whether the optimizer has written the copies.
        """
        if self._copied and not are_written:
            with torch.no_grad():
                torch._foreach_copy_(
                    [holding.piece for holding in self._copied],
                    [holding.master.view(holding.piece.shape) for holding in self._copied],
                )
        if self._masters:
            self._note()

    def is_new(self) -> bool:
        """Returns whether the tensors of ``param_groups`` have values that were not spread.

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


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
