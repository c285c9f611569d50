"""A model of diffusion, with a time step among its inputs and tables in buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Denoiser(nn.Module):
    """A model that uses a time step as diffusion models do, and tables in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.SiLU())
        self.value = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.logspace(0, -4, 4))
        self.register_buffer("slopes", torch.rand(6, 6))
        self.register_buffer("weights", torch.rand(8))
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, timestep: Tensor, target: Tensor | None = None) -> Any:
        self.seen = [timestep]
        self.calls += 1
        angles = timestep[:, None] * self.frequencies
        hidden = self.body(x + self.time(torch.cat([angles.sin(), angles.cos()], -1)))
        scores = hidden @ hidden.t() / 8**0.5 + self.slopes
        mixed = scores.softmax(-1) @ self.value(hidden)
        if target is None:
            return mixed
        labels = torch.arange(len(x)) % 8
        return F.mse_loss(mixed, target) + F.cross_entropy(mixed, labels, self.weights)
