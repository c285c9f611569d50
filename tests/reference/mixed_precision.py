"""Training in 16 bits in one process, written out: what every such run must come near to."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.reference.split_families import build_split_family, make_split_batch

CASE = "gptj"


@dataclass
class MixedRecord:
    """What a run left behind; names as in the Hugging Face model, float32 throughout."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[list[list[float]]] = field(default_factory=list)  # [step][batch][microbatch]
    grads: list[dict[str, Tensor]] = field(default_factory=list)  # [step], not clipped
    norms: list[float] = field(default_factory=list)  # [step], of these
    params: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    # With the default epsilon a gradient near zero turns rounding into a whole step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)  # type: ignore[arg-type]


@functools.cache
def train_mixed(
    dtype: torch.dtype,
    num_batches: int,
    microbatches: int,
    steps: int,
    loss_scale: float = 1.0,
    clipping: float | None = None,
) -> MixedRecord:
    """A small GPT-J with parameters in ``dtype``, masters and sums of gradients in float32.

    Args:
        dtype: of the model; float32 for plain training.
        num_batches: batches of a step, each as `make_split_batch` makes them.
        microbatches: pieces that each batch is cut into.
        steps: of AdamW.
        loss_scale: factor of the loss in backward, taken out again of the sums.
        clipping: L2 norm that gradients are clipped to.
    """
    model = build_split_family(CASE, torch.float32)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    record = MixedRecord(initial=_copies(masters))
    model.to(dtype)
    optimizer = make_optimizer(masters.values())
    for step in range(steps):
        record.losses.append([])
        for batch_idx in range(num_batches):
            record.losses[-1].append(
                _accumulate(model, masters, batch_idx, step, microbatches, loss_scale)
            )
        for master in masters.values():
            assert master.grad is not None
            master.grad /= microbatches * num_batches * loss_scale
        record.grads.append(
            {
                name: master.grad.clone()
                for name, master in masters.items()
                if master.grad is not None
            }
        )
        limit = float("inf") if clipping is None else clipping
        norm = nn.utils.clip_grad_norm_(masters.values(), limit)
        record.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    record.params = _copies(masters)
    return record


def _accumulate(
    model: nn.Module,
    masters: dict[str, nn.Parameter],
    batch_idx: int,
    step: int,
    microbatches: int,
    loss_scale: float,
) -> list[float]:
    """Adds up the gradients of one batch in the masters, in microbatch order; the losses."""
    batch = make_split_batch(CASE, batch_idx, step)
    pieces = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
    losses = []
    for mb in range(microbatches):
        loss = model(**{name: piece[mb] for name, piece in pieces.items()})["loss"].float()
        (loss * loss_scale).backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            master, grad = masters[name], parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            parameter.grad = None
    return losses


def _copies(masters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: master.detach().clone() for name, master in masters.items()}
