"""Chooses the modules to checkpoint: user marks, strategies for sequences, transformers."""

from smp.activations.huggingface import TransformersCheckpointing
from smp.activations.marks import (
    checkpoint_call,
    checkpoint_sequence,
    is_container,
    is_marked,
    mark,
    settle_marks,
    units,
)
from smp.activations.placement import note_placement

__all__ = [
    "TransformersCheckpointing",
    "checkpoint_call",
    "checkpoint_sequence",
    "is_container",
    "is_marked",
    "mark",
    "note_placement",
    "settle_marks",
    "units",
]
