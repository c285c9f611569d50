"""Layers that a budget recomputes: as little work as possible, and never too many bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.activations.budget import LayerCost, measure, plan_budget
from smp.modules.forwards import WrapperKind, is_wrapped


def needed(layers: list[LayerCost], plan: list[bool]) -> int:
    """Bytes at most: what is kept, and what a second run makes."""
    kept = sum(
        (layer.argument_bytes if again else layer.kept_bytes) * layer.num_kept
        for layer, again in zip(layers, plan, strict=True)
    )
    return kept + max((x.kept_bytes for x in layers), default=0) * any(plan)


def work(layers: list[LayerCost], plan: list[bool]) -> float:
    return sum(x.flops * x.num_kept for x, again in zip(layers, plan, strict=True) if again)


def test_equal_layers_recompute_as_few_as_needed() -> None:
    layers = [LayerCost(100, 10, 1.0, num_kept=2) for _ in range(8)]
    assert plan_budget(layers, 1600) == [False] * 8
    assert sum(plan_budget(layers, 1599)) == 1  # saves 180, and takes 100 for a moment
    assert sum(plan_budget(layers, 1500)) == 2
    assert plan_budget(layers, 100) == [True] * 8
    assert plan_budget([], 0) == []


def test_cheap_layers_go_first() -> None:
    dear, cheap = LayerCost(1000, 10, 50.0), LayerCost(1000, 10, 1.0)
    assert plan_budget([dear, cheap, dear, cheap], 3500) == [False, True, False, True]


@pytest.mark.parametrize("seed", range(20))
def test_is_the_best_of_all_plans(seed: int) -> None:
    chance = random.Random(seed)
    layers = [
        LayerCost(chance.randint(50, 200) * 4096, 4096 * 10, float(chance.randint(1, 9)), 2)
        for _ in range(7)
    ]
    whole = sum(x.kept_bytes * 2 for x in layers)
    plans = [list(plan) for plan in itertools.product((False, True), repeat=7)]
    for budget in range(0, whole + 1, whole // 13):
        fitting = [work(layers, plan) for plan in plans if needed(layers, plan) <= budget]
        plan = plan_budget(layers, budget)
        if not fitting:
            assert plan == [True] * 7
            continue
        assert needed(layers, plan) <= budget
        # Bytes are rounded up to a 4096th: a slightly smaller budget is met at no more work.
        rounded = [
            work(layers, p) for p in plans if needed(layers, p) <= budget - 8 * whole // 4096
        ]
        assert work(layers, plan) <= min(rounded, default=float("inf"))


def test_a_layer_is_measured() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 256)
            self.down = nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]

    layer, x = Layer(), torch.randn(32, 64, requires_grad=True)
    result, cost = measure(layer, layer, (x,), {})
    assert cost.argument_bytes == 32 * 64 * 4
    assert cost.kept_bytes == 32 * (64 + 256) * 4  # the argument, and what relu returned
    assert cost.flops >= 2 * 2 * 32 * 64 * 256
    result.sum().backward()
    assert layer.up.weight.grad is not None and x.grad is not None
    plain = torch.autograd.grad(layer(x).sum(), layer.up.weight)[0]
    assert torch.equal(plain, layer.up.weight.grad)


def test_weights_that_are_gathered_for_the_forward_do_not_count() -> None:
    """Imitates sharded data parallelism: parameters have their memory while their layer runs."""
    layer, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(32, 64)
    x.requires_grad_()
    _, expected = measure(layer, layer, (x,), {})
    whole = {p: p.detach().clone() for p in layer.parameters()}
    for p in whole:
        p.data = torch.full((), float("nan")).expand(p.shape)

    def forward(x: Tensor) -> Tensor:
        for child in layer:
            for p in child.parameters():
                p.data = whole[p].clone()
            x = child(x)
            for p in child.parameters():
                p.data = torch.full((), float("nan")).expand(p.shape)
        return x

    result, cost = measure(layer, forward, (x,), {})
    assert result.isfinite().all()
    assert cost.kept_bytes == expected.kept_bytes == 32 * (64 + 256) * 4
    assert cost.argument_bytes == expected.argument_bytes


def test_the_first_round_is_measured_and_the_next_ones_follow() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(128, 64)
    # A layer keeps its argument and the result of tanh, which is the next argument.
    one = 128 * 64 * 4
    smp.set_activation_checkpointing(net, strategy=f"budget:{7 * one / 2**30}")
    assert all(is_wrapped(layer, WrapperKind.CHECKPOINT) for layer in net)
    found = []
    for _ in range(3):
        y = net(x.requires_grad_())
        names = []
        node = y.grad_fn
        while node is not None:
            names.append(node.name())
            # The first child of a product with bias is the bias.
            children = [child for child, _ in node.next_functions if child is not None]
            node = children[min(1, len(children) - 1)] if children else None
        found.append(names.count("SmpRecomputeBackward"))
        y.sum().backward()
    assert found == [4, 3, 3]
