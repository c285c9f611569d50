"""A module of the user's, and hooks for its distributed form."""

from __future__ import annotations

from typing import Any

from torch import nn

import smp
from smp.tensor_parallel import registry

__all__ = ["GatedMlp", "forward_hook", "init_hook", "return_hook", "smp"]

smp.init({"tensor_parallel_degree": 2, "ddp": True})


class GatedMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


def init_hook(width: int) -> Any:
    return (width,), {}


def forward_hook(x: Any) -> Any:
    return (x,), {}


def return_hook(result: Any) -> Any:
    return result


def after(names: dict[str, Any]) -> None:
    found = registry.registration_of(GatedMlp(4))
    assert found is not None and found.dist_module is names["DistributedGatedMlp"]
