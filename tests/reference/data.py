"""Batches for the cases of `models.py`: padding, -100 labels, one stream per replica."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.reference.families import family_loss, family_of, make_family_batch
from tests.reference.models import HF_MODELS, VOCABULARY, WIDTH

BATCH = 8
SEQUENCE = 7


def make_batch(case: str, dtype: torch.dtype, dp_rank: int, step: int) -> dict[str, Tensor]:
    """Makes the batch of one data-parallel replica in one step; batch first, 8 samples."""
    generator = torch.Generator().manual_seed(7919 * (dp_rank + 1) + 104729 * step)
    if family_of(case) is not None:
        return make_family_batch(case, dtype, generator)
    if case not in HF_MODELS:
        x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randn(BATCH, 1, generator=generator, dtype=torch.float64)
        return {"x": x.to(dtype), "y": y.to(dtype)}
    ids = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    # Samples of 3 to 7 tokens, padded at the right.
    lengths = torch.randint(3, SEQUENCE + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    ids = ids * mask
    if case == "bert":
        labels = torch.randint(0, 3, (BATCH,), generator=generator)
    else:
        labels = ids.masked_fill(mask == 0, -100)
        hidden = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.2
        hidden[:, 1] = False  # each sample keeps a label, so that no mean is empty
        labels = labels.masked_fill(hidden, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compute_loss(case: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of one microbatch; `model` is plain or distributed."""
    if family_of(case) is not None:
        return family_loss(case, model, batch)
    if case in HF_MODELS:
        loss: Tensor = model(**batch)["loss"]
        return loss
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
