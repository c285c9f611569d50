"""State dicts of plain modules, for functions that know nothing of the wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.pool import Pool, RankFailure
from tests.harness import train_step_of

Config = dict[str, Any]
PARTS: list[Config] = [{"pipeline_parallel_degree": 2}, {"sharded_data_parallel_degree": 2}]
WHOLE: list[Config] = [{}, {"shard_optimizer_state": True}]


def ask(rank: int, config: Config, what: str) -> Any:
    import smp

    smp.init({"ddp": True, "microbatches": 2, "auto_partition": False, **config})
    torch.manual_seed(1)
    net: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    last = net.get_submodule("2")
    plain = {key: value.clone() for key, value in net.state_dict().items()}
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        smp.set_partition(last, 1)

    train_step = train_step_of(model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    train_step(torch.ones(4, 64))
    optimizer.step()
    gathered = model.state_dict()
    assert all(torch.equal(gathered[key], plain[key]) for key in plain if "weight" in key)
    if what == "names":
        return list(model.get_module().state_dict(keep_vars=True)) == list(plain)
    if what == "after cpu":
        net = model.cpu()
    asked = last if what == "part" else model.module if what == "module" else net
    state = {key.removeprefix("module."): value for key, value in asked.state_dict().items()}
    names = {f"2.{key}" if what == "part" else key: value for key, value in state.items()}
    return all(torch.equal(value, gathered[name]) for name, value in names.items())


@pytest.mark.parametrize("what", ["root", "module"])
@pytest.mark.parametrize("config", PARTS)
def test_placeholders_are_no_state(pool: Pool, config: Config, what: str) -> None:
    words = r"state_dict\(\) of a module whose parameters are not on this rank: '.*weight'"
    with pytest.raises(RankFailure, match=words):
        pool.run(2, ask, config, what)


@pytest.mark.parametrize("what", ["root", "module", "part"])
@pytest.mark.parametrize("config", WHOLE)
def test_whole_values_are(pool: Pool, config: Config, what: str) -> None:
    assert pool.run(2, ask, config, what) == [True, True]


@pytest.mark.parametrize("what", ["names", "after cpu"])
@pytest.mark.parametrize("config", PARTS)
def test_names_are_there_and_values_that_came_back(pool: Pool, config: Config, what: str) -> None:
    assert pool.run(2, ask, config, what) == [True, True]


def save_pretrained(rank: int, folder: str, gathers: bool) -> Any:
    import transformers

    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(1)
    sizes = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, lambda model, ids: model(ids, labels=ids).loss)
    train_step(torch.ones(4, 8, dtype=torch.long))
    state = model.state_dict() if gathers else None
    if rank == 0:
        plain.save_pretrained(folder, state_dict=state and dict(state))
    smp.barrier()
    return state


def test_save_pretrained_writes_whole_values_or_nothing(pool: Pool, tmp_path: Any) -> None:
    import transformers

    with pytest.raises(RankFailure, match=r"save_pretrained\(folder, state_dict="):
        pool.run(2, save_pretrained, str(tmp_path), False)
    state, _ = pool.run(2, save_pretrained, str(tmp_path), True)
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for key, value in read.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)
