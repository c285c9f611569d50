"""Trains for many steps on any layout. Usage: train_on.py PP STEPS

Prints ``STEP <number>`` after each step, and at the end ``LOSSES <list of floats>``, those of this
rank's microbatches.
"""

from __future__ import annotations

import json
import sys

import torch

import smp
from tests.dist.training import Run, init, make_model
from tests.reference.data import compute_loss, make_batch
from tests.reference.single_process import make_optimizer

CASE = "reuse"


def main() -> None:
    pp, steps = int(sys.argv[1]), int(sys.argv[2])
    run = Run(CASE, pp, 2, steps=steps)  # with ddp; the number of replicas follows from the world
    init(run)
    model = make_model(run)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    @smp.step
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = compute_loss(CASE, model, batch)
        model.backward(loss)
        return loss

    losses: list[float] = []
    for step in range(steps):
        output = train_step(make_batch(CASE, torch.float64, smp.dp_rank(), step))
        losses += [loss.item() for loss in output.outputs]
        optimizer.step()
        optimizer.zero_grad()
        print(f"STEP {step}", flush=True)
    print("LOSSES " + json.dumps({"dp_rank": smp.dp_rank(), "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
