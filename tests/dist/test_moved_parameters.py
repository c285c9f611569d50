"""Changes that scripts make to parameters between steps, without the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.harness import train_step_of

Config = dict[str, Any]


def train(rank: int, config: Config, how: str) -> float:
    """Parameters are halved after each step; how far they are from those of one process."""
    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    torch.manual_seed(5)
    dtype = torch.float32 if "bf16" in config else torch.float64
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(dtype)
    alone = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    train_step = train_step_of(model)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        reference.zero_grad()
        alone(x).square().mean().backward()
        reference.step()
        optimizer.zero_grad()
        train_step(x.chunk(smp.rdp_size())[smp.rdp_rank()])
        optimizer.step()
        for parameter in (*model.local_parameters(), *alone.parameters()):
            if how == "assigns":
                parameter.data = parameter.data * 0.5
            else:
                parameter.data.mul_(0.5)
    state = model.state_dict()
    return max(float((state[n] - v).abs().max()) for n, v in alone.state_dict().items())


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({}, "assigns"),
        ({}, "writes"),
        ({"pipeline_parallel_degree": 2}, "assigns"),
        ({"shard_optimizer_state": True}, "writes"),
    ],
)
def test_parameters_that_are_their_own_follow(pool: Pool, config: Config, how: str) -> None:
    assert max(pool.run(2, train, config, how)) < 1e-12


@pytest.mark.parametrize("config", [{"shard_optimizer_state": True}, {"bf16": True}])
def test_memory_that_updates_do_not_reach_is_refused(pool: Pool, config: Config) -> None:
    words = r"parameter '\d\.(weight|bias)' has been given other memory"
    with pytest.raises(RankFailure, match=words):
        pool.run(2, train, config, "assigns")


def copy_model(rank: int) -> None:
    import smp

    smp.init({"microbatches": 2})
    copy.deepcopy(smp.DistributedModel(nn.Linear(2, 2)))


def test_a_copy_of_a_distributed_model_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"cannot be copied .* copy the model that it wraps"):
        pool.run(1, copy_model)


class Writes(nn.Module):
    """Keeps a bias within bounds in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.bias.clamp_(-0.01, 0.01)
        return self.linear(x).square().mean()  # type: ignore[no-any-return]


def run_a_step(rank: int, net: nn.Module, config: Config, inputs: Tensor) -> None:
    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    model = smp.DistributedModel(net)
    train_step = train_step_of(model)
    train_step(inputs)


def test_forwards_that_write_into_a_copy_are_named(pool: Pool) -> None:
    config = {"sharded_data_parallel_degree": 2}
    words = r"wrote into parameter 'linear\.bias' .* what was written is lost"
    with pytest.raises(RankFailure, match=words):
        pool.run(2, run_a_step, Writes(), config, torch.ones(4, 4))
    pool.run(2, run_a_step, Writes(), {"shard_optimizer_state": True}, torch.ones(4, 4))


def test_rows_that_each_replica_would_scale_are_refused(pool: Pool) -> None:
    ids = torch.arange(4).reshape(4, 1)
    with pytest.raises(RankFailure, match="each of 2 replicas reads other rows"):
        pool.run(2, run_a_step, nn.Embedding(8, 4, max_norm=1.0), {}, ids)
    pool.run(1, run_a_step, nn.Embedding(8, 4, max_norm=1.0), {}, ids)
