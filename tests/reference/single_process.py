"""The plain training loop: what every distributed run must reproduce."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.reference.data import compute_loss, make_batch
from tests.reference.lifted_casts import lifted_casts
from tests.reference.models import build
from tests.reference.weights import divisor_of, shares

LEARNING_RATE = 1e-2
# Adam divides by the root of the second moment. Where a gradient is zero but
# for rounding (key biases), a tiny epsilon turns rounding into full steps.
ADAM_EPSILON = 1e-4


@dataclass
class Record:
    """A record of a run, step by step; names as in the plain model."""

    losses: list[list[list[float]]] = field(default_factory=list)  # [step][replica][microbatch]
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # [step]
    params: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)  # type: ignore[arg-type]


def accumulate_gradients(
    case: str, model: nn.Module, batches: list[dict[str, Tensor]], microbatches: int
) -> list[list[float]]:
    """Leaves gradients of the loss of the global batch in ``.grad``.

    Each microbatch counts by what its loss is a mean over. Sums run over the microbatches of a
    replica first, then over replicas: in fp32 another order of the same terms alone makes a
    difference of several 1e-6.

    Args:
        batches: one per replica.

    Returns:
        the losses of microbatches, by replica.
    """
    found: list[list[Tensor]] = []
    weights: list[list[float]] = []
    for batch in batches:
        pieces = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
        found.append([])
        weights.append([])
        for mb in range(microbatches):
            piece = {name: pieces[name][mb] for name in batch}
            run = functools.partial(compute_loss, case, model, piece)
            loss, weight = divisor_of(model, run, len(next(iter(piece.values()))))
            found[-1].append(loss)
            weights[-1].append(weight)
    total: dict[nn.Parameter, Tensor] = {}
    for losses, own in zip(found, shares(weights), strict=True):
        for loss, share in zip(losses, own, strict=True):
            (loss * share).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                before = total.get(parameter)
                total[parameter] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None
    for parameter, grad in total.items():
        parameter.grad = grad
    return [[loss.item() for loss in losses] for losses in found]


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
