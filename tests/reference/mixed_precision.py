"""The small GPT-J in any precision in one process: what every cell of the grid comes near to."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests.reference.half_precision import HalfRecord, train_half
from tests.reference.split_families import build_split_family, make_split_batch

CASE = "gptj"


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(**batch)["loss"]
    return loss


@functools.cache
def train_mixed(
    dtype: torch.dtype,
    num_batches: int,
    microbatches: int,
    steps: int,
    loss_scale: float = 1.0,
    clipping: float | None = None,
) -> HalfRecord:
    """Parameters in ``dtype``, masters and sums of gradients in float32.

    Args:
        dtype: dtype of the model; float32 for plain training.
        num_batches: batches of a step, each as `make_split_batch` makes them.
        microbatches: pieces that each batch is cut into.
        steps: number of steps of AdamW.
        loss_scale: factor of the loss in backward.
        clipping: L2 norm that gradients are clipped to.
    """
    batches = [
        [make_split_batch(CASE, batch_idx, step) for batch_idx in range(num_batches)]
        for step in range(steps)
    ]
    model = build_split_family(CASE, torch.float32)
    return train_half(model, dtype, compute_loss, batches, microbatches, loss_scale, clipping)
