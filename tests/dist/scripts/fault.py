"""Trains a small chain; one rank misbehaves as told.

Usage: fault.py ACTION PLACE VICTIM [--pp P] [--dp D]

The victim prints ``FAULT <monotonic time>`` just before it misbehaves. A rank
that gets through all steps prints ``FINISHED``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import torch

import smp

STEPS, FAULTY_STEP, FAULTY_MB, MICROBATCHES, WIDTH = 4, 1, 2, 4, 6


def misbehave(action: str) -> None:
    print(f"FAULT {time.monotonic()}", flush=True)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise ZeroDivisionError("the layer broke")
    elif action == "exit":
        sys.exit(3)
    elif action == "sleep":
        time.sleep(8)
    elif action == "barrier":
        smp.barrier()


class Trap(torch.autograd.Function):
    """Identity that springs in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: str | None) -> torch.Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.action is not None:
            misbehave(ctx.action)
        return grad, None


class Layer(torch.nn.Module):
    def __init__(self, place: str | None, action: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.place, self.action = place, action
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = self.training and self.calls == FAULTY_STEP * MICROBATCHES + FAULTY_MB
        self.calls += 1
        if now and self.place == "forward":
            misbehave(self.action)
        spring = self.action if now and self.place == "backward" else None
        return torch.tanh(Trap.apply(self.linear(x), spring))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action")
    parser.add_argument("place")
    parser.add_argument("victim", type=int)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    faulty = rank == args.victim
    microbatches = MICROBATCHES
    if faulty and args.place == "config":
        print(f"FAULT {time.monotonic()}", flush=True)
        microbatches = 2 * MICROBATCHES
    smp.init(
        {
            "pipeline_parallel_degree": args.pp,
            "microbatches": microbatches,
            "ddp": args.dp > 1,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    layers = []
    for index in range(args.pp):
        mine = faulty and index == smp.pp_rank()
        with smp.partition(index):
            layers.append(Layer(args.place if mine else None, args.action))
    model = smp.DistributedModel(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for step in range(STEPS):
        now = faulty and step == FAULTY_STEP
        if now and args.place == "between":
            misbehave(args.action)
        if now and args.place == "fewer":
            print(f"FAULT {time.monotonic()}", flush=True)
            break
        train_step(torch.randn(8, WIDTH))
        if now and args.place == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: misbehave(args.action))
        optimizer.step()
        optimizer.zero_grad()
    print("FINISHED", flush=True)


if __name__ == "__main__":
    main()
