"""A mixture of the user's whose experts are modules in a list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import smp

__all__ = ["Network", "smp"]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row = (chosen == number).nonzero().flatten()
            if len(row):
                y.index_add_(0, row, expert(x[row]) * weight[row, None])
        return y


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Mixture(), Mixture())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def after(names: dict[str, Any]) -> None:
    """Checks that each rank has half of the experts, and that the model trains."""
    held = {n for n, p in names["model"].local_named_parameters() if ".experts." in n and p.numel()}
    assert {name.split(".")[3] for name in held} in ({"0", "1"}, {"2", "3"})
    names["model"](torch.randn(8, 4)).square().sum().backward()
    assert names["model"].get_module().layers[0].gate.weight.grad is not None
