"""Import path of v1 for activation checkpointing."""

from smp.activations.checkpointing import (
    checkpoint,
    checkpoint_sequential,
    set_activation_checkpointing,
)

__all__ = [
    "checkpoint",
    "checkpoint_sequential",
    "set_activation_checkpointing",
]
