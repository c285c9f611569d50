"""Models whose parameters have memory in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import smp

pytestmark = pytest.mark.usefixtures("ends")


def wrap(module: nn.Module, **config: object) -> None:
    smp.init({"microbatches": 1, **config})
    smp.DistributedModel(module)


def pair(first: torch.Tensor, second: torch.Tensor) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[0].weight = nn.Parameter(first)
    net[1].weight = nn.Parameter(second)
    return net


def with_buffer(shares: bool) -> nn.Module:
    net = nn.Linear(4, 4)
    net.register_buffer("same", net.weight.data if shares else net.weight.data.clone())
    return net


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def normed() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(4, 4))


def pieces() -> nn.Module:
    """Makes a model as libraries do that keep all parameters in one piece of memory."""
    flat = torch.randn(32)
    return pair(flat[:16].view(4, 4), flat[16:].view(4, 4))


def overlapping() -> nn.Module:
    flat = torch.randn(28)
    return pair(flat[:16].view(4, 4), flat[12:].view(4, 4))


def transposed() -> nn.Module:
    weight = torch.randn(4, 4)
    return pair(weight, weight.t())


def inside() -> nn.Module:
    """A small one in a large one, and another one behind."""
    flat = torch.randn(32)
    net = pair(flat[:16].view(4, 4), flat[16:].view(4, 4))
    net[0].bias = nn.Parameter(flat[4:8])
    return net


OVERLAPS: list[Callable[[], nn.Module]] = [overlapping, inside, lambda: with_buffer(True)]


@pytest.mark.parametrize("make", [tied, normed, pieces, lambda: with_buffer(False), nn.LSTM])
def test_those_that_have_theirs_alone_are_taken(make: Callable[..., nn.Module]) -> None:
    wrap(nn.LSTM(4, 4) if make is nn.LSTM else make(), bf16=True)


@pytest.mark.parametrize("make", OVERLAPS)
def test_others_are_taken_where_nothing_moves(make: Callable[[], nn.Module]) -> None:
    wrap(make())


@pytest.mark.parametrize("make", [transposed, *OVERLAPS])
def test_others_are_refused_by_name_where_they_move(make: Callable[[], nn.Module]) -> None:
    words = r"'(0\.weight|same|weight)' and '(1\.weight|0\.bias|weight|same)' are two tensors with"
    with pytest.raises(ValueError, match=words):
        wrap(make(), bf16=make is not transposed)
