"""Ranks that read one batch (``context_parallel_degree``) are replicas of the parameters.

The models here do not split sequences: each rank of a cp group computes the whole batch. So every
layout trains as one process does that reads each batch once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist import sharded_training, split_training
from tests.dist.pool import Pool
from tests.dist.resume_training import Job
from tests.dist.split_training import SplitRun
from tests.dist.test_resume import check_end, check_layout, check_loaded, check_parts, run_all
from tests.dist.training import Run, check_runs

FP64 = torch.float64


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("pp", "dp", "cp"), [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 3), (2, 2, 2), (2, 1, 4)]
)
def test_ranks_with_one_batch_train_like_one_process(pool: Pool, pp: int, dp: int, cp: int) -> None:
    check_runs(pool, [Run("gpt2", pp, dp, cp=cp), Run("zigzag", pp, dp, "simple", cp=cp)])


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
    run = Run("gpt2", 1, dp, microbatches=2, dtype=FP64, cp=2)
    sharded_training.check_runs(pool, run, degree, tolerance=1e-9)
    check_runs(pool, [run])  # what the run above was compared with


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
