"""`finetune.py --check`: repeats the first steps in one process and compares.

Rank 0 trains a copy of the initial model, in plain PyTorch, on the batches of all data-parallel
ranks, cut into the same microbatches. Difference of a tensor: max|a - b| / max|reference|, with the
largest gradient times 1e-3 as the floor of the denominator.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import smp

FLOOR = 1e-3
NUM_SHOWN = 3
DROPOUTS = {"attn_pdrop", "embd_pdrop", "resid_pdrop"}
Difference = tuple[float, str]  # and of what


class Part(NamedTuple):
    """A record of one rank; the lists have an entry per step."""

    dp_rank: int
    losses: list[float]
    grads: list[dict[str, Tensor]]  # of the parameters of this rank


class Plain(NamedTuple):
    """Functions by which one process trains."""

    compute_loss: Callable[..., Tensor]
    make_optimizer: Callable[..., torch.optim.Optimizer]
    make_schedule: Callable[..., Any]
    translate: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # gradients to the model's names


class Check:
    """Made before the model is wrapped. `record` goes after each step, before clipping."""

    def __init__(self, model: nn.Module, num_steps: int, tolerance: float) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # two runs would draw different random numbers
        for field in DROPOUTS & vars(model.config).keys():  # from which replaced layers are made
            setattr(model.config, field, 0.0)
        self._num_steps, self._tolerance = num_steps, tolerance
        self._model = copy.deepcopy(model) if smp.rank() == 0 else None
        self._device = torch.device("cpu")
        self._own = Part(smp.dp_rank(), [], [])

    def record(self, loss: Tensor, model: smp.DistributedModel) -> None:
        if len(self._own.losses) < self._num_steps:
            self._device = loss.device
            self._own.losses.append(loss.item())
            named = model.local_named_parameters()
            self._own.grads.append(
                {n: p.grad.cpu().clone() for n, p in named if p.grad is not None}
            )

    def agrees(self, replicas: list[Iterable[Any]], args: Namespace, plain: Plain) -> bool:
        """Repeats the steps on rank 0 and prints the largest differences. Collective.

        Args:
            replicas: training batches of each data-parallel rank.
            plain: the functions of the script.
        """
        parts = smp.allgather(self._own, smp.WORLD)
        result = None
        if self._model is not None:
            model = self._model.to(self._device).train()
            result = self._report(*_repeat(model, parts, replicas, args, plain))
        return bool(smp.allgather(result, smp.WORLD)[0])

    def _report(self, losses: list[Difference], grads: list[Difference]) -> bool:
        worst_loss, worst_grads = max(losses), sorted(grads, reverse=True)[:NUM_SHOWN]
        agrees = max(worst_loss[0], worst_grads[0][0]) <= self._tolerance
        print(
            f"check: {len(losses)} losses and {len(grads)} gradients against one process; largest "
            f"relative differences (tolerance {self._tolerance:.0e}):"
        )
        for difference, name in [worst_loss, *worst_grads]:
            print(f"check:   {difference:.1e}  {name}")
        print(f"check: {'passed' if agrees else 'FAILED'}", flush=True)
        return agrees


def _repeat(
    model: nn.Module,
    parts: list[Part],
    replicas: list[Iterable[Any]],
    args: Namespace,
    plain: Plain,
) -> tuple[list[Difference], list[Difference]]:
    """Differences of losses and of gradients, each with its name."""
    optimizer = plain.make_optimizer(model, args)
    schedule = plain.make_schedule(optimizer, args)
    batches = [iter(replica) for replica in replicas]
    losses, grads = [], []
    for step in range(len(parts[0].losses)):
        where = f"step {step + 1}"
        for dp_rank, replica in enumerate(batches):
            expected = _run_microbatches(model, next(replica), args, plain)
            for part in (p for p in parts if p.dp_rank == dp_rank):
                difference = abs(part.losses[step] - expected) / abs(expected)
                losses.append((difference, f"loss, replica {dp_rank}, {where}"))
        for parameter in (p for p in model.parameters() if p.grad is not None):
            parameter.grad /= args.microbatches * len(replicas)
        got: dict[str, Tensor] = {}
        for part in parts:
            got |= part.grads[step]
        differences = _differences(model, plain.translate(got))
        grads += [(d, f"gradient of {name}, {where}") for d, name in differences]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, grads


def _run_microbatches(
    model: nn.Module, batch: dict[str, Tensor], args: Namespace, plain: Plain
) -> float:
    """Adds to the gradients; returns the mean loss."""
    device = next(model.parameters()).device
    pieces = {name: x.to(device).chunk(args.microbatches) for name, x in batch.items()}
    losses = []
    for mb in range(args.microbatches):
        loss = plain.compute_loss(model, {n: x[mb] for n, x in pieces.items()}, args.precision)
        loss.backward()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def _differences(model: nn.Module, got: dict[str, Tensor]) -> list[Difference]:
    """Relative difference by name; a gradient that only one side has counts as infinite."""
    expected = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    floor = FLOOR * max(grad.abs().max().item() for grad in expected.values())
    result = [(float("inf"), f"{n} (on one side only)") for n in expected.keys() ^ got.keys()]
    for name in expected.keys() & got.keys():
        difference = (got[name] - expected[name]).abs().max().item()
        result.append((difference / max(expected[name].abs().max().item(), floor), name))
    return result
