"""A training script that knows nothing of its launcher; prints its losses as JSON."""

from __future__ import annotations

import json

import torch

import smp
from tests.reference.data import make_batch
from tests.reference.models import build
from tests.reference.single_process import make_optimizer


def main() -> None:
    smp.init({"microbatches": 4})
    model = smp.DistributedModel(build("gpt2", torch.float64))
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    @smp.step
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch)["loss"]
        model.backward(loss)
        return loss

    losses = []
    for step in range(3):
        losses += [t.item() for t in train_step(make_batch("gpt2", torch.float64, 0, step)).outputs]
        optimizer.step()
        optimizer.zero_grad()
    calls = smp.allgather(smp.metrics.server_stats()["remote_calls"], smp.WORLD)
    if smp.rank() == 0:
        print("RESULT " + json.dumps({"size": smp.size(), "losses": losses, "calls": sum(calls)}))


if __name__ == "__main__":
    main()
