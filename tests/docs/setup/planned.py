"""A module of the user's with columns and rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import smp

__all__ = ["Network", "smp"]

smp.init({"tensor_parallel_degree": 2, "ddp": True})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


def after(names: dict[str, Any]) -> None:
    shapes = {name: tuple(p.shape) for name, p in names["model"].local_named_parameters()}
    assert shapes["blocks.1.up.weight"] == (3, 4)
    assert names["model"](torch.ones(2, 4)).shape == (2, 4)
