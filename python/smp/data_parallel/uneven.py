"""The interface by which steps handle replicas with different numbers of batches."""

from __future__ import annotations

from typing import Any, Protocol


class UnevenBatches(Protocol):
    """An open `join` (`smp.model.join`)."""

    def announce(self, syncs_buffers: bool) -> int:
        """Announces a training step; returns the position of the first rank that has a batch."""

    def end_step(self) -> None:
        """Sees an announced step end: gradients are reduced."""

    def watch(self, output: Any) -> None:
        """Announces the backward of this output if no step function does."""
