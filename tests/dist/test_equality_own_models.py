"""Own modules give the losses, gradients and parameters of one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.training import LAYOUTS, MICROBATCHES, SCHEDULES, Run, check_runs

CASES = (
    "chain",
    "reuse",
    "nested",
    "zigzag",
    "structures",
    "branches",
    "unused",
    "passing",
)
CROSS = tuple(itertools.product(SCHEDULES, MICROBATCHES))


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_manual_partition_trains_like_one_process_in_fp64(
    pool: Pool, case: str, pp: int, dp: int
) -> None:
    check_runs(pool, [Run(case, pp, dp, s, mb, manual=True) for s, mb in CROSS])


@pytest.mark.sample(keep=3)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_auto_partition_trains_like_one_process_in_fp64(
    pool: Pool, case: str, pp: int, dp: int
) -> None:
    check_runs(pool, [Run(case, pp, dp, s, mb) for s, mb in (("interleaved", 4), ("simple", 2))])


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
def test_own_models_train_like_one_process_in_fp32(pool: Pool, pp: int, dp: int) -> None:
    runs = [Run(case, pp, dp, dtype=torch.float32, manual=True) for case in CASES]
    check_runs(pool, runs)


@pytest.mark.sample(keep=0)
def test_large_active_microbatches_change_nothing(pool: Pool) -> None:
    limits = (1, 2, 8)
    runs = [
        Run("zigzag", 2, 1, s, 8, manual=True, config=(("active_microbatches", limit),))
        for s, limit in itertools.product(SCHEDULES, limits)
    ]
    check_runs(pool, runs)


@pytest.mark.sample(keep=0)
def test_gradients_without_overlap_and_with_small_buckets_are_the_same(pool: Pool) -> None:
    variants = (
        (("overlapping_allreduce", False),),
        (("bucket_cap_mb", 0.0005),),
        (("gradient_as_bucket_view", True),),
        (("broadcast_buffers", False),),
        (("find_unused_parameters", True),),
    )
    runs = [Run("branches", 2, 2, manual=True, model_args=args) for args in variants]
    check_runs(pool, runs)
