"""State dicts for models on the meta device, loaded before the first step makes their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch
from tests.reference.families import build_family

CASE = "hf/gpt2"
DELAYED = {"delayed_parameter_initialization": True, "skip_tracing": True, "ddp": True}
PP = {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}


def start(config: dict[str, Any], split: bool = False, delayed: bool = True) -> tuple[Any, ...]:
    """Model, optimizer and a function that trains one step, with values of their own."""
    import smp

    smp.init({**DELAYED, **PP, **config, "delayed_parameter_initialization": delayed})
    torch.manual_seed(9)
    with smp.model_creation(tensor_parallelism=split, zero_init=delayed):
        plain = build_family(CASE)
    assert all(p.is_meta for p in plain.parameters()) == delayed
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train_step = train_step_of(model, lambda model, batch: compute_loss(CASE, model, batch))

    def train(step: int) -> float:
        loss = train_step(make_batch(CASE, torch.float32, smp.rdp_rank(), step)).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return model, optimizer, train


def pretrained() -> dict[str, Any]:
    torch.manual_seed(21)
    model = build_family(CASE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
    return dict(model.state_dict())


def losses_of(rank: int, config: dict[str, Any], split: bool, how: str) -> list[float]:
    """Three steps that begin with given values."""
    import smp

    model, _, train = start(config, split, delayed=how != "at once")
    state = pretrained()
    if how == "in pieces":
        names = list(state)
        model.load_state_dict({name: torch.zeros_like(state[name]) for name in names}, strict=False)
        for part in (names[::2], names[1::2]):
            report = model.load_state_dict({name: state[name] for name in part}, strict=False)
            assert set(report.missing_keys) == set(names) - set(part)
    elif how == "wrong elsewhere":  # the values of the first replica count
        model.load_state_dict(
            {key: value + smp.rdp_rank() for key, value in state.items()}, strict=True
        )
    else:
        report = model.load_state_dict(state, strict=not split)
        assert report.missing_keys == report.unexpected_keys == []
    del state
    losses = [train(0)]
    for name, value in model.local_named_parameters():
        assert not value.is_meta, name
    return [*losses, train(1), train(2)]


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("world", "config", "split", "how"),
    [
        (2, {}, False, "whole"),
        (2, {}, False, "in pieces"),
        (4, {"shard_optimizer_state": True}, False, "whole"),
        (4, SDP, False, "whole"),
        (4, SDP, False, "in pieces"),
        (4, {"fp16": True}, False, "in pieces"),
        (4, {"tensor_parallel_degree": 2}, True, "whole"),
    ],
    ids=str,
)
def test_values_given_before_the_first_step_are_those_of_the_model(
    pool: Pool, world: int, config: dict[str, Any], split: bool, how: str
) -> None:
    expected = pool.run(world, losses_of, config, split, "at once")
    assert pool.run(world, losses_of, config, split, how) == expected
    assert expected[0][-1] != expected[0][0], "the optimizer does nothing"


def test_the_values_of_the_first_replica_count(pool: Pool) -> None:
    expected = pool.run(4, losses_of, {}, False, "at once")
    assert pool.run(4, losses_of, {}, False, "wrong elsewhere") == expected


def save_and_go_on(rank: int, config: dict[str, Any], folder: str) -> list[float]:
    import smp

    model, optimizer, train = start(config)
    train(0)
    state = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    smp.save(state, f"{folder}/part.pt", partial=True)
    return [train(1), train(2)]


def resume(rank: int, config: dict[str, Any], folder: str, same: bool) -> list[float]:
    import smp

    model, optimizer, train = start(config)
    state = smp.load(f"{folder}/part.pt", partial=True)
    report = model.load_state_dict(state["model"], same_partition_load=same)
    assert report.missing_keys == report.unexpected_keys == []
    optimizer.load_state_dict(state["optimizer"])
    del state
    return [train(1), train(2)]


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("fp16", [False, True])
def test_parts_of_ranks_wait_too(pool: Pool, tmp_path: Path, fp16: bool, same: bool) -> None:
    config = {"fp16": fp16}
    expected = pool.run(2, save_and_go_on, config, str(tmp_path))
    assert pool.run(2, resume, config, str(tmp_path), same) == expected


def load_wrongly(rank: int, how: str) -> None:
    import smp

    model, _, train = start({})
    state = pretrained()
    if how == "keys":
        with pytest.raises(RuntimeError, match="unexpected keys: .*surplus"):
            model.load_state_dict({**state, "surplus": torch.ones(1)})
        with pytest.raises(RuntimeError, match="has shape"):
            model.load_state_dict({key: torch.ones(1) for key in state})
        model.load_state_dict(state)  # what was refused is not kept
        train(0)
        return
    if how == "written":
        model.load_state_dict(state)
        next(iter(state.values())).zero_()
        error = "written to after model.load_state_dict"
    else:
        if smp.rank() == 0:
            model.load_state_dict(state)
        error = "call it on all of them"
    with pytest.raises(RuntimeError, match=error):
        train(0)


@pytest.mark.parametrize("how", ["keys", "written", "some ranks"])
def test_states_that_cannot_be_kept_are_refused(pool: Pool, how: str) -> None:
    pool.run(2, load_wrongly, how)
