"""Optimizers that need whole parameters, or all of them, where a rank has parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.pool import Pool, RankFailure
from tests.harness import train_step_of


class ByNormOfAll(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        having = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in having]).norm()
        for p in having:
            p.sub_(p.grad / norm, alpha=0.1)


def make(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "by norm of all":
        return ByNormOfAll(parameters)
    if name == "LBFGS":
        return torch.optim.LBFGS(parameters)
    return torch.optim.Adafactor(parameters, lr=0.01)


def train(rank: int, config: dict[str, Any], name: str) -> float:
    """Returns the distance of parameters from those of one process after three steps."""
    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    torch.manual_seed(5)
    net, alone = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double() for _ in range(2))
    alone.load_state_dict(net.state_dict())
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(make(name, model.parameters()))
    reference = make(name, alone.parameters())
    train_step = train_step_of(model)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()
        reference.zero_grad()
        alone(x).square().mean().backward()
        reference.step()
        optimizer.zero_grad()
        train_step(x.chunk(smp.rdp_size())[smp.rdp_rank()])
        optimizer.step()
    state = model.state_dict()
    return max(float((state[n] - v).abs().max()) for n, v in alone.state_dict().items())


BY_ELEMENTS = {"optimizer_state": "elements"}
SHARDED = ({"shard_optimizer_state": True}, {"sharded_data_parallel_degree": 2})


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        *(
            ({**config, **BY_ELEMENTS}, "Adafactor", "by other elements of its parameter")
            for config in SHARDED
        ),
        *((config, "by norm of all", "by other parameters") for config in SHARDED),
        ({"pipeline_parallel_degree": 2}, "by norm of all", "by other parameters"),
        ({"pipeline_parallel_degree": 2}, "LBFGS", "by other parameters"),
        ({"shard_optimizer_state": True}, "LBFGS", "by other parameters"),
        (
            {"tensor_parallel_degree": 2, **BY_ELEMENTS},
            "Adafactor",
            "by other elements of its parameter",
        ),
    ],
)
def test_what_would_train_with_other_numbers_is_refused(
    pool: Pool, config: dict[str, Any], name: str, words: str
) -> None:
    with pytest.raises(RankFailure, match=f"{words}.*with {next(iter(config))}"):
        pool.run(2, train, config, name)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"pipeline_parallel_degree": 2}, "Adafactor"),
        ({}, "Adafactor"),
        ({}, "by norm of all"),
    ],
)
def test_where_ranks_have_what_it_needs_it_trains(
    pool: Pool, config: dict[str, Any], name: str
) -> None:
    assert max(pool.run(2, train, config, name)) < 1e-12
