"""Calls that belong around a step function, inside of it, where gradients are not whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.dist.pool import Pool, RankFailure

WIDTH = 8
Config = dict[str, Any]
LAYOUTS: list[tuple[int, Config]] = [
    (1, {}),
    (2, {}),
    (2, {"pipeline_parallel_degree": 2}),
    (2, {"shard_optimizer_state": True}),
    (2, {"sharded_data_parallel_degree": 2}),
]
Call = Callable[[Any, Any, Tensor], Any]


def assign_gradients(model: Any, optimizer: Any, loss: Tensor) -> None:
    for parameter in model.local_parameters():
        parameter.grad = torch.zeros_like(parameter)


def smp_clip(model: Any, optimizer: Any, loss: Tensor) -> None:
    import smp

    smp.clip_grad_norm_(model.parameters(), 1.0)


CALLS: dict[str, tuple[Call, str]] = {
    "zero_grad": (lambda _, o, __: o.zero_grad(), "optimizer.zero_grad was .* in front of"),
    "model.zero_grad": (lambda m, _, __: m.zero_grad(), "model.zero_grad was .* in front of"),
    "step": (lambda _, o, __: o.step(), "optimizer.step was .* behind"),
    "clip": (lambda m, _, __: clip_grad_norm_(m.parameters(), 1.0), "clip_grad_norm_ was "),
    "value": (lambda m, _, __: clip_grad_value_(m.parameters(), 1.0), "clip_grad_value_ was "),
    "smp clip": (smp_clip, "clip_grad_norm_ was "),
    "own clip": (lambda _, o, __: o.clip_master_grads(1.0), "clip_master_grads was "),
    "assign": (assign_gradients, r"\.grad of '.*' was assigned"),
}


def train(rank: int, config: Config, call: str, wraps: bool = True) -> Any:
    import smp

    smp.init({"ddp": True, "microbatches": 2, "auto_partition": False, **config})
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        smp.set_partition(net[2], 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if wraps:
        optimizer = smp.DistributedOptimizer(optimizer)
    inside = CALLS[call][0] if call in CALLS else None

    @smp.step
    def train_step(x: Tensor) -> None:
        loss = model(x).square().mean()
        model.backward(loss)
        if inside is not None:
            inside(model, optimizer, loss)

    for _ in range(2):
        optimizer.zero_grad()
        train_step(torch.ones(4, WIDTH))
        optimizer.step()
    return {name: value.sum().item() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("size", "config"), LAYOUTS)
def test_they_are_refused(pool: Pool, size: int, config: Config, call: str) -> None:
    with pytest.raises(RankFailure, match=CALLS[call][1]):
        pool.run(size, train, config, call)


@pytest.mark.parametrize("call", ["step", "clip", "value"])
@pytest.mark.parametrize(("size", "config"), LAYOUTS[:3])
def test_those_of_an_optimizer_that_is_not_wrapped(
    pool: Pool, size: int, config: Config, call: str
) -> None:
    with pytest.raises(RankFailure, match=CALLS[call][1]):
        pool.run(size, train, config, call, False)


def other_model(rank: int) -> list[float]:
    """A small net of the script's own learns inside of the step, as a probe does."""
    import smp

    smp.init({"ddp": True, "microbatches": 2})
    model = smp.DistributedModel(nn.Linear(WIDTH, WIDTH))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    probe = nn.Linear(WIDTH, 1)
    own = torch.optim.SGD(probe.parameters(), lr=0.5)
    before = probe.weight.detach().clone()

    @smp.step
    def train_step(x: Tensor) -> None:
        out = model(x)
        own.zero_grad()
        probe(out.detach()).square().mean().backward()
        clip_grad_norm_(probe.parameters(), 1.0)
        own.step()
        model.backward(out.square().mean())

    optimizer.zero_grad()
    train_step(torch.ones(4, WIDTH))
    optimizer.step()
    return [float((probe.weight - before).abs().max())]


def test_what_is_the_scripts_own_is_left_alone(pool: Pool) -> None:
    for [moved] in pool.run(2, other_model):
        assert moved > 0


def compiled_step(rank: int, config: Config) -> Any:
    """``torch.compile`` around a step function leaves it as it is."""
    import smp

    step = smp.step

    def compiled(function: Callable[..., Any]) -> Any:
        return torch.compile(step(function), backend="eager")

    smp.step = compiled  # type: ignore[assignment]
    try:
        return train(rank, config, "nothing")
    finally:
        smp.step = step


def test_a_compiled_step_function_runs(pool: Pool) -> None:
    for size, config in LAYOUTS[1:3]:
        assert pool.run(size, compiled_step, config) == pool.run(size, train, config, "nothing")
