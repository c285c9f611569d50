"""A small model, and a batch that is the same in every process."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Net", "nn", "torch", "x", "y"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


torch.manual_seed(0)
_generator = torch.Generator().manual_seed(1)
x, y = torch.randn(8, 16, generator=_generator), torch.randint(4, (8,), generator=_generator)
