"""A trial of the order of queries, keys and values runs a copy of a module and no more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.nn.planned.order_trial import OrderTrial
from smp.nn.planned.runs import CannotTry

WIDTH, HEADS = 8, 4


class Attention(nn.Module):
    """A simple attention: the result of a head depends on its query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.calls, self.unread = HEADS, [0], 8
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        self.count += 1
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        y: Tensor = self.proj(((q * k).sigmoid() * v * self.scale).flatten(-2))
        return y


BY_HEAD = {rank: torch.arange(12) + 12 * rank for rank in range(2)}
CONCATENATED = dict(enumerate(x.flatten() for x in torch.arange(24).view(3, 8).split(4, 1)))
HALVES = {"proj": (4, 4)}


def try_all(trial: OrderTrial, own: dict[int, Tensor]) -> list[str | None]:
    return [trial.problem_of(rank, own[rank], {"heads": HEADS // 2}, HALVES) for rank in own]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_order_of_the_code_fits_and_no_other(device: str) -> None:
    module = Attention().to(device)
    trial = OrderTrial(module, "qkv", ["proj"])
    assert try_all(trial, BY_HEAD) == [None, None]
    assert all("differs by" in str(problem) for problem in try_all(trial, CONCATENATED))
    assert trial.numbers == {"heads": HEADS}


def test_the_module_stays_as_it_is() -> None:
    module = Attention().train()
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    trial = OrderTrial(module, "qkv", ["proj"])
    try_all(trial, BY_HEAD)
    assert torch.equal(state, torch.get_rng_state())
    assert module.calls == [0] and module.heads == HEADS and module.qkv.training
    assert type(module) is Attention and "forward" not in module.qkv.__dict__
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


class NeedsMask(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + mask)


class Draws(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


class ReadsWeights(Attention):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(nn.functional.linear(x.float(), self.qkv.weight)[..., :WIDTH])
        return y


class HoldsGenerator(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.others = (x for x in range(3))


def with_meta_mask() -> nn.Module:
    module = Attention()
    module.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool, device="meta"))
    return module


def with_hook() -> nn.Module:
    module = Attention()
    module.proj.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (NeedsMask, "with all features it raises TypeError"),
        (Draws, "draws random numbers"),
        (ReadsWeights, "does not call 'qkv'"),
        (HoldsGenerator, "cannot be copied"),
        (with_meta_mask, "buffer 'mask' has no values"),
        (with_hook, "'proj' has hooks"),
    ],
)
def test_what_cannot_be_tried_is_told(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(CannotTry, match=text):
        OrderTrial(make(), "qkv", ["proj"])
