"""Bytes of an optimizer's state per element, by its storage (docs/design/optimizer_bytes.md)."""

from __future__ import annotations

import torch

#: Neighbouring elements of 8-bit moments that share a scale.
BLOCK = 256

#: Dtypes of Adam's moments, by value of ``state_dtype``.
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}

#: Bytes beside a bfloat16 parameter for the digits that it lacks, by value of ``masters``.
MASTER_BYTES = {"fp32": 4, "residue": 1, "none": 0}

#: With moments in host memory, parameters with fewer elements keep theirs on the device, and an
#: update has at most `SLOTS` pieces of so many elements there.
LEAST_AWAY_ELEMENTS = 1 << 16
PIECE_ELEMENTS = 1 << 24
SLOTS = 3  # one piece comes, one is updated, and one leaves

_SCALE_BYTES = 4


def moment_bytes(state_dtype: str) -> float:
    """Returns the bytes of both moments of an element, its share of the scales included."""
    scales = _SCALE_BYTES / BLOCK if state_dtype == "int8" else 0.0
    return 2 * (STATE_DTYPES[state_dtype].itemsize + scales)
