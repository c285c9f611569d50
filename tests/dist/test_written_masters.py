"""Optimizers and scripts that write to parameters beside the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool, RankFailure
from tests.harness import (
    Config,
    Layers,
    assert_near,
    layouts,
    own_samples,
    samples_of,
    train_step_of,
    wholes,
    wrapped,
)

STEPS = 3
BF16 = {"bf16": True}
LAYOUTS = layouts("replicas", "pipeline", "split", "sharded state", "sharded", "bf16") | {
    f"bf16, {name}": (size, BF16 | config)
    for name, (size, config) in layouts("sharded state", "sharded").items()
}


class ScheduleFree(torch.optim.Optimizer):
    """Keeps two sets of weights, and shows one or the other."""

    def __init__(self, params: Iterable[Any], lr: float, data: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.data, self.trains = data, True

    def _swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    z = self.state[p]["z"]
                    target, other = (p.data if self.data else p), z.clone()
                    z.copy_(target)
                    target.copy_(other)

    @torch.no_grad()
    def eval(self) -> None:
        if self.trains:
            self._swap()
        self.trains = False

    @torch.no_grad()
    def train(self) -> None:
        if not self.trains:
            self._swap()
        self.trains = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "z" not in state:
                        state["z"] = p.clone()
                    p.add_(p.grad, alpha=-group["lr"])
                    state["z"].lerp_(p, 0.3)


def by_method(optimizer: Any) -> None:
    optimizer.eval()


def by_inner(optimizer: Any) -> None:
    """Through the optimizer that the script had before it was wrapped."""
    getattr(optimizer, "optimizer", optimizer).eval()


def by_groups(optimizer: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


WAYS: dict[str, Callable[[Any], None]] = {
    "method": by_method,
    "inner": by_inner,
    "groups": by_groups,
}


def reference(way: str) -> tuple[list[float], dict[str, Tensor]]:
    net = Layers().double()
    optimizer = ScheduleFree(net.parameters(), 0.5, False)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(samples_of(step)).square().mean().backward()
        optimizer.step()
        WAYS[way](optimizer)
        with torch.no_grad():
            losses.append(float(net(samples_of(step)).square().mean()))
        if step < STEPS - 1:
            optimizer.train()
    return losses, dict(net.state_dict())


def train(rank: int, config: Config, way: str, data: bool, reads: str, folder: str = "") -> Any:
    import smp

    dtype = torch.float32 if "bf16" in config else torch.float64
    model = wrapped(config, Layers().to(dtype))
    optimizer = smp.DistributedOptimizer(ScheduleFree(model.parameters(), 0.5, data))
    train_step = train_step_of(model)

    @smp.step
    def evaluate(x: Tensor) -> Tensor:
        return model(x).square().mean()

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(own_samples(step, dtype))
        optimizer.step()
        WAYS[way](optimizer)
        x = samples_of(step, dtype)
        with torch.no_grad():
            if reads == "step":
                losses.append(float(evaluate(x).reduce_mean()))
            elif reads == "forward":
                losses.append(float(model(x).square().mean()))
        if step < STEPS - 1:
            optimizer.train()
    if reads == "save":
        smp.save_checkpoint(folder, "t", partial=True, model=model)
        smp.resume_from_checkpoint(folder, "t", partial=True, model=model)
    return losses, wholes(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_reaches_the_model(pool: Pool, layout: str, way: str) -> None:
    if (layout, way) == ("pipeline", "groups"):
        pytest.skip("parameters of other ranks, which are placeholders here, are not written to")
    size, config = LAYOUTS[layout]
    losses, expected = reference(way)
    bound = 0.05 if "bf16" in config else 1e-12
    for seen, values in pool.run(size, train, config, way, False, "step"):
        assert seen == pytest.approx(losses, rel=bound)
        assert_near([values], expected, bound)


@pytest.mark.parametrize("reads", ["forward", "save", "state"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["sharded state", "bf16", "sharded"])
def test_what_is_written_reaches_forwards_and_files(
    pool: Pool, tmp_path: Any, layout: str, way: str, reads: str
) -> None:
    size, config = LAYOUTS[layout]
    losses, expected = reference(way)
    bound = 0.05 if "bf16" in config else 1e-12
    for seen, values in pool.run(size, train, config, way, False, reads, str(tmp_path)):
        assert reads != "forward" or seen == pytest.approx(losses, rel=bound)
        assert_near([values], expected, bound)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_methods_may_write_to_data(pool: Pool, layout: str) -> None:
    """``tensor.data`` has a version counter of its own."""
    size, config = LAYOUTS[layout]
    losses, _ = reference("method")
    bound = 0.05 if "bf16" in config else 1e-12
    for seen, _ in pool.run(size, train, config, "method", True, "step"):
        assert seen == pytest.approx(losses, rel=bound)


def exchange_memory(rank: int, config: Config) -> None:
    import smp

    smp.init({"ddp": True, **config})
    model = smp.DistributedModel(Layers().double())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = train_step_of(model)
    train_step(samples_of(0))
    optimizer.step()
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data * 0.5
    train_step(samples_of(0))


@pytest.mark.parametrize("layout", ["sharded state", "sharded"])
def test_other_memory_is_refused(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    with pytest.raises(RankFailure, match=r"'layers.0.weight' was given other memory"):
        pool.run(size, exchange_memory, config)


def count_gathers(rank: int) -> int:
    """An update is spread once, whatever comes behind it."""
    import smp
    from smp.model import engine_of

    smp.init({"ddp": True, "shard_optimizer_state": True})
    model = smp.DistributedModel(Layers().double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step = train_step_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(samples_of(step))
        optimizer.step()
    model.state_dict()
    storage: Any = engine_of(model).storage
    return int(storage.num_gathers)


def test_an_update_is_spread_once(pool: Pool) -> None:
    assert pool.run(2, count_gathers) == [STEPS, STEPS]
