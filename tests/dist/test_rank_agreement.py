"""Ranks of one model have to agree on hyperparameters, on a model to train, and on the batch."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool, RankFailure
from tests.harness import (
    WIDTH,
    Config,
    Heard,
    Layers,
    assert_near,
    layouts,
    own_samples,
    samples_of,
    train_step_of,
    wholes,
    wrapped,
)

STEPS = 4
LAYOUTS = layouts(
    "pipeline", "replicas", "sharded", "sharded state", "bf16", "split", "split, one batch",
    "pipeline of replicas",
)  # fmt: skip


# ---- hyperparameters ---------------------------------------------------------------------------


def reduce_on_plateau(rank: int, config: Config, differs: str, wraps: bool) -> Any:
    """The learning rate of the second group follows the loss of each rank."""
    import smp

    dtype = torch.float32 if "bf16" in config else torch.float64
    model = wrapped(config, Layers().to(dtype))
    listed = list(model.parameters())
    groups = [{"params": listed[::2], "weight_decay": 0.1}, {"params": listed[1::2]}]
    own = torch.optim.AdamW(groups, lr=0.01)
    optimizer = smp.DistributedOptimizer(own) if wraps else own
    train_step = train_step_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(own_samples(step, dtype))
        optimizer.step()
        if step == 1 and rank == smp.size() - 1 and differs:
            optimizer.param_groups[1][differs] = 0.5
    return wholes(model)


@pytest.mark.parametrize("differs", ["lr", "weight_decay"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_hyperparameters_on_one_rank_are_an_error(
    pool: Pool, layout: str, differs: str
) -> None:
    size, config = LAYOUTS[layout]
    words = rf"disagree on '{differs}' of parameter group 1 of optimizer 0 \(AdamW\): 0.01 on"
    with pytest.raises(RankFailure, match=words) as failure:
        pool.run(size, reduce_on_plateau, config, differs, True)
    assert re.search(rf"0\.5 on global rank {size - 1}\. Set the same value", str(failure.value))


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
def test_those_of_an_optimizer_that_is_not_wrapped_are_compared(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    with pytest.raises(RankFailure, match=r"'lr' of parameter group 1 .* \(AdamW, not wrapped\)"):
        pool.run(size, reduce_on_plateau, config, "lr", False)


def leave_after(rank: int, config: Config, leaves: str, folder: str) -> None:
    """The last update has another rate on one rank; what it has made leaves the job."""
    import smp

    model = wrapped(config, Layers())
    listed = list(model.parameters())
    groups = [{"params": listed[::2]}, {"params": listed[1::2]}]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.01))

    @smp.step
    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        if torch.is_grad_enabled():
            model.backward(loss)

    for number in range(2):
        step(own_samples(number, torch.float32))
        if number == 1 and rank == smp.size() - 1:
            optimizer.param_groups[1]["lr"] = 0.5
        optimizer.step()
    if leaves == "save":
        smp.save_checkpoint(folder, "last", model=model, optimizer=optimizer)
    elif leaves == "state":
        model.state_dict()
    else:
        with torch.no_grad():
            step(own_samples(2, torch.float32))


@pytest.mark.parametrize(
    ("layout", "leaves"),
    [
        *((layout, "save") for layout in LAYOUTS),
        *((layout, "state") for layout in ("pipeline", "sharded", "split")),
        *((layout, "evaluate") for layout in ("pipeline", "sharded")),
    ],
)
def test_the_last_update_is_compared_where_it_leaves_the_job(
    pool: Pool, tmp_path: Path, layout: str, leaves: str
) -> None:
    size, config = LAYOUTS[layout]
    words = rf"disagree on 'lr' of parameter group 1 .* 0\.5 on global rank {size - 1}\. Set the"
    with pytest.raises(RankFailure, match=words):
        pool.run(size, leave_after, config, leaves, str(tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_hyperparameters_train_as_in_one_process(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS[layout]
    net = Layers().double()
    listed = list(net.parameters())
    groups = [{"params": listed[::2], "weight_decay": 0.1}, {"params": listed[1::2]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(samples_of(step)).square().mean().backward()
        optimizer.step()
    bound = 0.02 if "bf16" in config else 1e-12
    assert_near(pool.run(size, reduce_on_plateau, config, "", True), net.state_dict(), bound)


def exchange_params(rank: int) -> list[int]:
    """The script exchanges the parameter of a group for a parameter of the other stage."""
    import smp
    from smp.world import runtime

    model = wrapped({"pipeline_parallel_degree": 2}, Layers().double())
    first, last = (list(model.parameters())[i] for i in (0, -1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([first], lr=0.01))
    train_step_of(model)(own_samples(0, torch.float64))
    updating = runtime.current().wrapped.updating
    seen = []
    for parameter in (first, last, first):
        optimizer.param_groups[0]["params"] = [parameter]
        seen.append(len(updating()))
    return seen


def test_an_optimizer_updates_where_its_present_parameters_are(pool: Pool) -> None:
    assert pool.run(2, exchange_params) == [[1, 0, 1], [0, 1, 0]]


def by_rank(rank: int) -> None:
    """Trains on a pipeline whose ranks have groups of their own parameters, with own rates."""
    import smp

    model = wrapped({"pipeline_parallel_degree": 2}, Layers().double())
    train_step = train_step_of(model)
    train_step(samples_of(0))
    own = list(model.local_parameters())
    groups = [{"params": own}] if rank == 0 else [{"params": [p], "lr": 0.3} for p in own]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    for step in range(2):
        train_step(samples_of(step))
        optimizer.step()


def test_groups_of_parameters_of_one_rank_are_its_own(pool: Pool) -> None:
    pool.run(2, by_rank)


# ---- a model that is not wrapped ---------------------------------------------------------------


def train_unwrapped(rank: int, config: Config, how: str) -> float:
    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    net = Layers().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @smp.step
    def train_step(x: Tensor) -> Any:
        loss = net(x).square().mean()
        if how == "train":
            loss.backward()
        return loss

    with torch.set_grad_enabled(how != "evaluate"):
        loss = train_step(samples_of(0))
    optimizer.step()
    return float(loss.reduce_mean())


@pytest.mark.parametrize(
    ("size", "config"), [(1, {}), (2, {}), (2, {"pipeline_parallel_degree": 2}),
                         (2, {"tensor_parallel_degree": 2})],
)  # fmt: skip
def test_a_forgotten_distributed_model_is_an_error(pool: Pool, size: int, config: Config) -> None:
    words = r"gave gradients to a Linear, but there is no smp.DistributedModel.*Wrap the model"
    with pytest.raises(RankFailure, match=words):
        pool.run(size, train_unwrapped, config, "train")


@pytest.mark.parametrize("how", ["evaluate", "look"])
def test_step_functions_that_train_nothing_need_no_model(pool: Pool, how: str) -> None:
    expected = Layers().double()(samples_of(0)).square().mean().item()
    for seen in pool.run(2, train_unwrapped, {}, how):
        assert seen == pytest.approx(expected, rel=1e-12)


def test_one_process_without_microbatches_is_a_plain_script(pool: Pool) -> None:
    pool.run(1, train_unwrapped, {"microbatches": 1}, "train")


# ---- the batch of other ranks ------------------------------------------------------------------


def train_on(rank: int, config: Config, others: str) -> list[str]:
    import smp

    heard = Heard("Ranks of one pipeline train on one batch")
    model = wrapped(config, Layers().double())

    @smp.step
    def train_step(x: Tensor | None) -> None:
        model.backward(model(x).square().mean())

    for step in range(3):
        x: Tensor | None = own_samples(step)
        if smp.pp_rank() > 0:
            if others == "values":
                x = own_samples(step + 7)
            elif others == "length" and step > 0:
                x = own_samples(step)[:2]
            elif others == "zeros":
                x = torch.zeros(8, WIDTH, dtype=torch.float64)
            elif others == "dummy":
                x = torch.empty(0, WIDTH, dtype=torch.float64)
        train_step(x)
    logging.getLogger("smp").removeHandler(heard)
    return heard.texts


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ("values", r"argument 'x' has other values here than there, on global rank 0"),
        ("length", r"argument 'x' has shape \[2, 8\] here and \[8, 8\] there"),
    ],
)
def test_another_batch_behind_the_first_rank_is_told_once(
    pool: Pool, others: str, words: str
) -> None:
    first, second = pool.run(2, train_on, {"pipeline_parallel_degree": 2}, others)
    assert first == [] and len(second) == 1
    assert re.search(words, second[0])


@pytest.mark.parametrize("others", ["same", "dummy", "zeros"])
def test_the_same_batch_and_dummies_are_not_told(pool: Pool, others: str) -> None:
    config = {"pipeline_parallel_degree": 2}
    assert pool.run(2, train_on, config, others) == [[], []]
