"""The needs of a rank that the partition expects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """The expected needs of one pipeline rank for one model, in bytes.

    Attributes:
        parameters: bytes of its parameters.
        activations: bytes of activations of one microbatch; 0 if not traced.
        in_flight: number of microbatches whose activations it keeps.
        peak: bytes of parameters, gradients, optimizer state and activations.
        checkpointed: bytes of activations of all microbatches in flight if each block of the rank
            were checkpointed, with the largest block recomputed; 0 if not traced.
        block_bytes: parameter bytes of each block of the whole model.
    """

    parameters: float = 0.0
    activations: float = 0.0
    in_flight: int = 1
    peak: float = 0.0
    checkpointed: float = 0.0
    block_bytes: tuple[int, ...] = ()
