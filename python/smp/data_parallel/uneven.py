"""What steps know of replicas with different numbers of batches."""

from __future__ import annotations

from typing import Any, Protocol


class UnevenBatches(Protocol):
    """A `join` that is open (`smp.model.join`)."""

    def announce(self, syncs_buffers: bool) -> int:
        """Says that a training step begins; returns the position of the first that has one."""

    def watch(self, output: Any) -> None:
        """Announces a backward from this output, where no step function does."""
