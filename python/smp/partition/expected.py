"""What the partition expects a rank to need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """Of one pipeline rank and one model. Bytes.

    Attributes:
        parameters: that it holds.
        activations: of one microbatch; 0: not traced.
        in_flight: microbatches whose activations it keeps.
        peak: parameters with gradients and optimizer state, and activations.
        checkpointed: activations of all microbatches in flight if each block of the rank were
            checkpointed, and the largest one computed again; 0: not traced.
        block_bytes: parameters of each block of the whole model.
    """

    parameters: float = 0.0
    activations: float = 0.0
    in_flight: int = 1
    peak: float = 0.0
    checkpointed: float = 0.0
    block_bytes: tuple[int, ...] = ()
