"""Random numbers that modules draw for dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from smp._device import forked_generators


def rates_in(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the modules and attributes that hold dropout rates."""
    return [
        (inside, key)
        for inside in module.modules()
        for key, value in inside.__dict__.items()
        if isinstance(value, float | int)
        and ("drop" in key or (key == "p" and isinstance(inside, _DropoutNd)))
    ]


def any_drops(rates: Sequence[tuple[nn.Module, str]]) -> bool:
    """Returns whether one of these rates is above zero now."""
    return any(_is_rate(module.__dict__.get(key)) for module, key in rates)


def _is_rate(value: Any) -> bool:
    return isinstance(value, float | int) and value > 0


@contextmanager
def draws_from(seed: int, device: torch.device) -> Iterator[None]:
    """Makes the generators begin with a seed inside, and restores them at the end."""
    with forked_generators(device):
        torch.manual_seed(seed)
        yield
