"""Trains a few steps over pipelines; one rank fails in the way that the command line says."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import smp

HOW, RANK = sys.argv[1], int(sys.argv[2])
if HOW == "config":
    smp.init({"pipeline_parallel_degree": 2, "microbatch": 4})
smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True})
num_calls = 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global num_calls
        num_calls += 1
        if num_calls > 6 and smp.rank() == RANK:
            if HOW == "raise":
                raise ValueError("no such label\n" + "\n".join(f"line {i}" for i in range(100)))
            if HOW == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW == "hang":
                time.sleep(1000)
        y: torch.Tensor = self.inner(x)
        return y


torch.manual_seed(1)
between = nn.Dropout(0.5) if HOW == "dropout" else nn.Tanh()
model: Any = smp.DistributedModel(nn.Sequential(Layer(), between, Layer()))
optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


for index in range(4):
    if HOW == "deadlock" and index == 2 and smp.rank() == RANK:
        smp.barrier()
    train_step(model, torch.randn(8, 8))
    optimizer.step()
    optimizer.zero_grad()
