"""A training script that knows nothing of its launcher; prints its losses as JSON."""

from __future__ import annotations

import json

import torch

import smp
from tests.reference.data import compute_loss, make_batch
from tests.reference.models import build
from tests.reference.single_process import make_optimizer

CASE = "reuse"  # of our own: the models of transformers take 8 s to import


def main() -> None:
    smp.init({"microbatches": 4})
    model = smp.DistributedModel(build(CASE, torch.float64))
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    @smp.step
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = compute_loss(CASE, model, batch)
        model.backward(loss)
        return loss

    losses = []
    for step in range(3):
        losses += [t.item() for t in train_step(make_batch(CASE, torch.float64, 0, step)).outputs]
        optimizer.step()
        optimizer.zero_grad()
    calls = smp.allgather(smp.metrics.server_stats()["remote_calls"], smp.WORLD)
    if smp.rank() == 0:
        print("RESULT " + json.dumps({"size": smp.size(), "losses": losses, "calls": sum(calls)}))


if __name__ == "__main__":
    main()
