"""A training run over two pipeline ranks, between two steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import smp

__all__ = ["folder", "loader", "model", "optimizer", "smp", "torch", "train_step"]

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
torch.manual_seed(1)
model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
loader = [torch.randn(4, 4) for _ in range(8)]
folder = "checkpoints"


@smp.step
def _step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    model.backward(loss)
    return loss


def train_step(batch: torch.Tensor) -> Any:
    return _step(model, batch)
