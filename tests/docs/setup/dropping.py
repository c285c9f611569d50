"""A model that drops, and what one process makes of a batch."""

from __future__ import annotations

import torch
from torch import nn

import smp
from smp.dropout import places
from smp.dropout.batches import BatchTable, Samples
from smp.dropout.masks import mixed

__all__ = ["batch", "loss_of_one_process", "make_model", "smp", "torch"]

batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def _alone() -> torch.Tensor:
    """Computes the model's first step by hand, with the seed that `make_model` has left."""
    model = make_model()
    samples = Samples(BatchTable(mixed(1, 0), ((8, 1),)), [0], 0, 0)
    root = places.Place(places.mixed(0, places.key_of("0:"), 0), samples)
    place = places.Place(places.mixed(root.key, places.key_of("0:1"), 0), samples)
    hidden = place.drop(model[0](batch), 0.5)
    loss: torch.Tensor = model[2](hidden).square().mean()
    return loss.detach()


loss_of_one_process = _alone()
