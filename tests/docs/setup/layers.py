"""A partitioned model with named layers and with a sequence of layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

import smp

__all__ = ["model", "smp"]

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
_calls: Counter[str] = Counter()


class _Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _calls[self.name] += 1
        return torch.tanh(self.linear(x))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.h = nn.ModuleList(_Layer(f"h{i}") for i in range(4))
        self.layers = nn.Sequential(*(_Layer(f"layer{i}") for i in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.transformer.h:
            x = layer(x)
        return self.layers(x)


model = smp.DistributedModel(_Net())


@smp.step
def _train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def after(names: dict[str, Any]) -> None:
    """Checks that marked modules run twice per microbatch, and all others once."""
    _train_step(model, torch.randn(4, 8))
    _calls.clear()
    _train_step(model, torch.randn(4, 8))
    calls = sum(map(Counter, smp.allgather(dict(_calls), smp.WORLD)), Counter())
    marked = {"h3", *(f"layer{i}" for i in range(4))}
    for name in [f"{kind}{i}" for kind in ("h", "layer") for i in range(4)]:
        assert calls[name] == (4 if name in marked else 2), calls
