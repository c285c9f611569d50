"""The plain training loop: what every distributed run must reproduce."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.reference.data import compute_loss, joined, make_batch
from tests.reference.lifted_casts import lifted_casts
from tests.reference.models import build

LEARNING_RATE = 1e-2
# Adam divides by the root of the second moment. Where a gradient is zero but
# for rounding (key biases), a tiny epsilon turns rounding into full steps.
ADAM_EPSILON = 1e-4


@dataclass
class Record:
    """What a run left behind, step by step; names as in the plain model."""

    losses: list[list[list[float]]] = field(default_factory=list)  # [step][replica][microbatch]
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # [step]
    params: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)  # type: ignore[arg-type]


def accumulate_gradients(
    case: str, model: nn.Module, batches: list[dict[str, Tensor]], microbatches: int
) -> list[list[float]]:
    """Leaves gradients of the loss of the global batch in ``.grad``.

    Args:
        batches: one per replica.

    Returns:
        the losses of microbatches, by replica.
    """
    losses: list[list[float]] = []
    for batch in batches:
        pieces = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
        losses.append([])
        for mb in range(microbatches):
            with torch.no_grad():
                piece = {name: pieces[name][mb] for name in batch}
                losses[-1].append(compute_loss(case, model, piece).item())
    compute_loss(case, model, joined(batches)).backward()
    return losses


@functools.cache
def train_reference(
    case: str,
    dtype: torch.dtype,
    replicas: int,
    microbatches: int,
    steps: int = 3,
    lifted: bool = False,
) -> Record:
    """`steps` AdamW steps on the data of `replicas` data-parallel ranks.

    Args:
        lifted: the model computes in float64 what it would cast to float32 (`lifted_casts`).
    """
    with lifted_casts(lifted):
        return _train_reference(case, dtype, replicas, microbatches, steps)


def _train_reference(
    case: str, dtype: torch.dtype, replicas: int, microbatches: int, steps: int
) -> Record:
    model = build(case, dtype)
    optimizer = make_optimizer(model.parameters())
    record = Record()
    for step in range(steps):
        batches = [make_batch(case, dtype, replica, step) for replica in range(replicas)]
        record.losses.append(accumulate_gradients(case, model, batches, microbatches))
        record.grads.append(
            {
                name: None if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    record.params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record
