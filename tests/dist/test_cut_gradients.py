"""``.grad`` of parameters of which a rank updates a piece."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure

Config = dict[str, Any]
CUT: list[Config] = [{"shard_optimizer_state": True}, {"sharded_data_parallel_degree": 2}]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def look(rank: int, config: Config, does: str) -> Any:
    import smp

    heard = Heard()
    logging.getLogger("smp").addHandler(heard)
    smp.init({"ddp": True, "microbatches": 2, **config})
    torch.manual_seed(1)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    for _ in range(2):
        optimizer.zero_grad()
        model.zero_grad()
        train_step(torch.ones(4, 16))
        smp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    train_step(torch.ones(4, 16))
    before = [text for text in heard.texts if ".grad of" in text]
    if does == "assign":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    if does == "pickle":
        pickle.dumps(model)
    for _ in range(2):
        assert all((parameter.grad is None) == bool(config) for parameter in model.parameters())
    for parameter in model.parameters():
        del parameter.grad
    logging.getLogger("smp").removeHandler(heard)
    return before, [text for text in heard.texts if ".grad of" in text]


@pytest.mark.parametrize("config", CUT)
def test_the_first_look_is_told(pool: Pool, config: Config) -> None:
    (before, said), (_, other) = pool.run(2, look, config, "look")
    assert not before and not other
    assert len(said) == 1 and "at the parameters of optimizer.param_groups" in said[0]


def test_whole_gradients_are_there(pool: Pool) -> None:
    assert pool.run(2, look, {}, "look") == [([], []), ([], [])]


@pytest.mark.parametrize("config", CUT)
def test_assigning_is_refused(pool: Pool, config: Config) -> None:
    with pytest.raises(RankFailure, match=r"\.grad of '0\.weight' was assigned, but this rank"):
        pool.run(2, look, config, "assign")


def test_a_model_is_not_pickled(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="a DistributedModel cannot be pickled"):
        pool.run(2, look, {}, "pickle")
