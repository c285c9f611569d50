"""Training steps that are judged by one process: run on ranks, run in one process, compared.

What is trained, and how it is split, is said by `split_training`, `expert_training` and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.tolerances import assert_close, relative_difference
from tests.reference.weights import divisor_of, shares

#: fp64 against a reference without casts to float32, and fp32.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
Batch = dict[str, Tensor]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # With the default epsilon a gradient near zero turns rounding into a whole step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


@dataclass(kw_only=True)
class Steps:
    """Records what one rank saw.

    Attributes:
        rdp_rank: the rank's number among those with the same slices of the same partition.
        batch_idx: index of the batch that the rank reads among a step's batches.
    """

    rdp_rank: int
    batch_idx: int
    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    logits: list[Tensor] = field(default_factory=list)  # of the first step, by microbatch
    norms: list[float] = field(default_factory=list)  # [step]
    grads: list[dict[str, Any]] = field(default_factory=list)  # [step], local, marked


def run_steps(
    record: Steps,
    model: Any,
    optimizer: Any,
    batch_of: Callable[[int], Batch],
    steps: int,
    *,
    keeps_grads: bool = True,
) -> None:
    """Trains a `DistributedModel` that returns a dict with a loss, and notes what happens.

    Args:
        record: gets the numbers.
        model, optimizer: model and optimizer to train.
        batch_of: makes this rank's batch of a step.
        steps: number of steps.
        keeps_grads: False where gradients are in shards.
    """
    import smp

    @smp.step
    def train_step(batch: Batch) -> tuple[Tensor, Tensor | None]:
        output = model(**batch)
        model.backward(output["loss"])
        return output["loss"], output["logits"].detach() if "logits" in output else None

    for step in range(steps):
        losses, logits = train_step(batch_of(step))
        record.losses.append([loss.item() for loss in losses.outputs])
        if step == 0 and logits is not None:
            record.logits = [part.detach().cpu().clone() for part in logits.outputs]
        record.norms.append(float(smp.clip_grad_norm_(model.parameters(), 1e9)))
        if keeps_grads:
            record.grads.append(marked_values(model, "grad"))
        optimizer.step()
        optimizer.zero_grad()


def marked_values(model: Any, what: str) -> dict[str, Any]:
    """Local gradients or values by name, with what says which slices they are."""
    from smp.tensor_parallel import partial

    named = list(model.local_named_parameters())
    values = {name: getattr(p, what) for name, p in named}
    present = {n: v.detach().cpu().clone() for n, v in values.items() if v is not None}
    return {**present, partial.PARTIAL_MARK: True, partial.SHARDS_MARK: partial.slices_of(named)}


@dataclass
class Reference:
    """The same steps in one process, with the model as its authors wrote it."""

    losses: list[list[list[float]]] = field(default_factory=list)  # [step][batch][microbatch]
    logits: list[list[Tensor]] = field(default_factory=list)  # [batch][microbatch], first step
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def reference_steps(
    model: nn.Module,
    batch_of: Callable[[int, int], Batch],
    num_batches: int,
    microbatches: int,
    steps: int,
) -> Reference:
    """Trains a model on the loss of the global batch, of which microbatches have their shares.

    Args:
        model: returns a mapping with a loss.
        batch_of: returns the batch of a replica and a step.
        num_batches: number of replicas' batches that make a global one.
        microbatches: number of microbatches whose losses and logits are noted.
        steps: number of steps.
    """
    optimizer = make_optimizer(model.parameters())
    reference = Reference()
    for step in range(steps):
        reference.losses.append([])
        losses: list[Tensor] = []
        weights: list[list[float]] = []
        for batch_idx in range(num_batches):
            batch = batch_of(batch_idx, step)
            pieces = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
            outputs: list[Mapping[str, Tensor]] = []
            weights.append([])
            for mb in range(microbatches):
                piece = {name: piece[mb] for name, piece in pieces.items()}

                def run(piece: Batch = piece, outputs: list[Any] = outputs) -> Tensor:
                    outputs.append(model(**piece))
                    loss: Tensor = outputs[-1]["loss"]
                    return loss

                loss, weight = divisor_of(model, run, len(next(iter(piece.values()))))
                losses.append(loss)
                weights[-1].append(weight)
            reference.losses[-1].append([output["loss"].item() for output in outputs])
            if step == 0:
                logits = [output["logits"].detach() for output in outputs if "logits" in output]
                reference.logits.append(logits)
        for loss, share in zip(losses, sum(shares(weights), []), strict=True):
            (loss * share).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        reference.grads.append(grads)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        reference.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    reference.params = {n: p.detach().clone() for n, p in model.named_parameters()}
    return reference


def check_numbers(
    where: str, record: Steps, expected: Reference, tolerance: float, norm_tolerance: float
) -> None:
    """Losses and norms of a rank."""
    assert len(record.losses) == len(expected.losses) > 0, where
    for step, found in enumerate(record.losses):
        losses = torch.tensor(found, dtype=torch.float64)
        wanted = torch.tensor(expected.losses[step][record.batch_idx], dtype=torch.float64)
        difference = relative_difference(losses, wanted)
        assert difference <= tolerance, f"{where}: losses of step {step}: {difference:.1e}"
        norm = abs(record.norms[step] / expected.norms[step] - 1)
        assert norm <= norm_tolerance, (
            f"{where}: norm of step {step} is {record.norms[step]}, not {expected.norms[step]}"
        )


def compare(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    dtype: torch.dtype,
    tolerance: float,
    what: str,
) -> None:
    """Gradients or parameters, whole ones, of which none is missing; not all are nearly zero."""
    missing = set(expected) - set(actual)
    assert not missing, f"{what}: none for {sorted(missing)}"
    assert max(tensor.abs().max().item() for tensor in expected.values()) > 1e-3
    known = {name: actual[name] for name in expected}
    assert_close(known, expected, dtype, what, tolerance)


def replicas_of(records: Sequence[Steps]) -> list[list[Any]]:
    """The records of each replica of the model together."""
    ranks = sorted({record.rdp_rank for record in records})
    return [[record for record in records if record.rdp_rank == rank] for rank in ranks]
