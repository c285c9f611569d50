"""Models with blocks that compute parts of sequences, and with blocks that cannot, by name.

Each is a plain module that gets token ids ``[B, S]`` and labels and returns the loss. What it
computes in one process is the reference.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from tests.reference.context_blocks import VOCABULARY, Maker
from tests.reference.context_mixing import LATER, OTHERS, WHOLE
from tests.reference.context_parts import IN_PARTS

MODELS: dict[str, Maker] = {
    **IN_PARTS,
    **{name: make for name, (make, _) in WHOLE.items()},
    **LATER,
    **OTHERS,
}


def build(name: str) -> nn.Module:
    """Makes a model in float64 and seeds Python's generator; each call gives the same weights."""
    torch.manual_seed(3)
    random.seed(3)
    return MODELS[name]().double()


def batch_of(step: int, lengths: tuple[int, ...], num_samples: int) -> dict[str, Tensor]:
    """Makes the batch of a step: ids and labels ``[B, S]``, of another length in each step."""
    generator = torch.Generator().manual_seed(step)
    shape = (num_samples, lengths[step % len(lengths)])
    ids, labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}
