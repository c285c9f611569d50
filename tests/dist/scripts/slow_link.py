"""Two replicas of one large parameter, whose broadcast and reduction take long on a slow link.

Usage: slow_link.py ROWS [--steps N] [--fault KIND]

Prints ``BROADCAST <seconds>``, ``STEP <seconds>`` and at the end ``FINISHED``; before a fault
``FAULT <monotonic time>``. Faults, in rank 1 after the first step: `barrier` and `receive` wait for
what the other rank, which is in a step, does not call.
"""

from __future__ import annotations

import argparse
import time

import torch

import smp


class Large(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((rows, rows), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() * self.weight.sum() / self.weight.numel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--fault", choices=["barrier", "receive"])
    args = parser.parse_args()
    smp.init({"ddp": True, "microbatches": 1, "auto_partition": False, "default_partition": 0})
    began_s = time.monotonic()
    print("IN BROADCAST", flush=True)
    model = smp.DistributedModel(Large(args.rows), average_grads_across_microbatches=True)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    print(f"BROADCAST {time.monotonic() - began_s:.2f}", flush=True)
    for step in range(args.steps):
        if step == 1 and args.fault and smp.rank() == 1:
            print(f"FAULT {time.monotonic()}", flush=True)
            if args.fault == "barrier":
                smp.barrier()
            smp.recv_from(0, smp.RankType.WORLD_RANK)
        began_s = time.monotonic()
        train_step(torch.ones(2, 2) * (1 + smp.rank()))
        print(f"STEP {time.monotonic() - began_s:.2f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    # The mean over the replicas of the mean of x, over all elements.
    weight = next(model.parameters())
    assert torch.allclose(weight, torch.full_like(weight, 0.5 - 0.15 / weight.numel()))
    print("FINISHED", flush=True)


if __name__ == "__main__":
    main()
