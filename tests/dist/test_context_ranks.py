"""Ranks that read one batch (``context_parallel_degree``) are replicas of the parameters.

The models here do not split sequences: each rank of a cp group computes the whole batch. So every
layout trains as one process does that reads each batch once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist import sharded_training, split_training
from tests.dist.pool import Pool
from tests.dist.resume_training import Job
from tests.dist.split_training import SplitRun
from tests.dist.test_resume import check_end, check_layout, check_loaded, check_parts, run_all
from tests.dist.training import Run, check_runs
from tests.harness import samples_of, train_step_of

FP64 = torch.float64


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("pp", "dp", "cp"), [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 3), (2, 2, 2), (2, 1, 4)]
)
def test_ranks_with_one_batch_train_like_one_process(pool: Pool, pp: int, dp: int, cp: int) -> None:
    check_runs(
        pool, [Run("gpt2", pp, dp, cp=cp, lifted=True), Run("zigzag", pp, dp, "simple", cp=cp)]
    )


@pytest.mark.parametrize("prescaled", [False, True])
def test_split_layers_beside_them_train_like_one_process(pool: Pool, prescaled: bool) -> None:
    split_training.check_runs(pool, [SplitRun("gpt2", 1, 2, 1, cp=2, prescaled=prescaled)])


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(("pp", "rdp"), [(2, 1), (1, 2)])
def test_split_layers_in_larger_grids_train_like_one_process(pool: Pool, pp: int, rdp: int) -> None:
    runs = [SplitRun("gptj", pp, 2, rdp, cp=2, prescaled=prescaled) for prescaled in (False, True)]
    split_training.check_runs(pool, runs)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(("dp", "degree"), [(1, 2), (2, 4), (2, 2)])
def test_parameters_are_sharded_over_them_too(pool: Pool, dp: int, degree: int) -> None:
    run = Run("gpt2", 1, dp, microbatches=2, dtype=FP64, cp=2, lifted=True)
    sharded_training.check_runs(pool, run, degree, tolerance=1e-9)
    check_runs(pool, [run])  # what the run above was compared with


def save_on_the_first_replica(rank: int, folder: str) -> Any:
    import smp

    smp.init({"context_parallel_degree": 2, "ddp": True, "shard_optimizer_state": True})
    torch.manual_seed(5)
    model = smp.DistributedModel(nn.Linear(8, 8).double())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train_step_of(model)(samples_of(0))
    optimizer.step()
    state = optimizer.local_state_dict()  # merged on the first rank of a shard group
    assert smp.rdp_rank() == 0  # as scripts ask before they save
    for turn in range(2):  # the part is written last
        if smp.cp_rank() == turn:
            smp.save({"optimizer": state}, f"{folder}/state", partial=True)
        smp.barrier()
    expected = optimizer.state_dict()["state"]
    optimizer.load_state_dict(smp.load(f"{folder}/state", partial=True)["optimizer"])
    return expected, optimizer.state_dict()["state"]


def test_a_rank_with_a_part_of_the_state_does_not_overwrite_the_whole(
    pool: Pool, tmp_path: Path
) -> None:
    for expected, loaded in pool.run(2, save_on_the_first_replica, str(tmp_path)):
        assert expected.keys() == loaded.keys() and len(expected) == 2
        for index, entry in expected.items():
            assert all(torch.equal(value, loaded[index][key]) for key, value in entry.items())
    assert [path.name for path in tmp_path.iterdir()] == ["state_0"]


def train_with_dropout(rank: int, cp: int) -> list[float]:
    import smp

    smp.init({"context_parallel_degree": cp, "ddp": True, "microbatches": 2})
    torch.manual_seed(5)
    layers = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)
    model = smp.DistributedModel(nn.Sequential(*layers).double())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(100 + rank)  # each rank another seed, as scripts do
    train_step = train_step_of(model)
    losses = []
    for step in range(3):
        losses.append(train_step(samples_of(step)).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_they_draw_the_numbers_of_the_first_one(pool: Pool) -> None:
    (expected,) = pool.run(1, train_with_dropout, 1)
    for losses in pool.run(2, train_with_dropout, 2):
        assert losses == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == 3


LAYOUTS = {
    Job(1, 1, 1, "state", cp=2): [Job(1, 1, 2), Job(2, 1, 1, cp=2), Job(1, 1, 1, "sdp2", cp=2)],
    Job(2, 1, 1, cp=2): [Job(1, 1, 1), Job(1, 1, 1, "state", cp=2)],
}
LARGE = {
    Job(1, 2, 1, "state", cp=2): [Job(1, 1, 2, "sdp4", cp=2), Job(1, 2, 1, cp=2)],
    Job(1, 1, 2, "sdp2", cp=2): [Job(1, 2, 1), Job(1, 1, 2, "state", cp=2)],
    Job(1, 1, 4, "state"): [Job(1, 1, 2, "state", cp=2), Job(1, 1, 1, cp=4)],
}


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("pairs", [LAYOUTS, LARGE], ids=["small", "large"])
def test_checkpoints_load_with_and_without_them(
    pool: Pool, tmp_path: Path, pairs: dict[Job, list[Job]]
) -> None:
    count = 0
    for source, target, before, after in run_all(pool, tmp_path, pairs):
        where = f"{source} to {target}"
        check_layout(where, source, before)
        check_layout(where, target, after)
        check_parts(where, source, tmp_path)
        check_loaded(where, before[0].at, after[0].at)
        check_end(where, source, target, before[0], after[0])
        count += 1
    assert count == sum(map(len, pairs.values()))
