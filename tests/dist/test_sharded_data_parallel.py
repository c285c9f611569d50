"""Sharded data parallelism equals plain data parallelism, and nothing stays whole."""

from __future__ import annotations

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.sharded_training import check_runs
from tests.dist.training import Run

FP64 = torch.float64


def run_of(case: str, pp: int, dp: int, dtype: torch.dtype = FP64, microbatches: int = 2) -> Run:
    return Run(case, pp, dp, microbatches=microbatches, dtype=dtype, steps=5)


@pytest.mark.parametrize("case", ["chain", "reuse", "gpt2", "bert"])
def test_two_ranks_get_bit_by_bit_what_plain_data_parallelism_gives(pool: Pool, case: str) -> None:
    check_runs(pool, run_of(case, 1, 2), 2, tolerance=0)


def test_four_ranks_as_two_copies_or_one(pool: Pool) -> None:
    for degree in (2, 4):
        check_runs(pool, run_of("gpt2", 1, 4, microbatches=1), degree, tolerance=1e-9)


def test_float32_with_a_large_epsilon(pool: Pool) -> None:
    check_runs(pool, run_of("gptj", 1, 4, torch.float32), 4, tolerance=1e-6)


@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_with_a_pipeline_gathers_follow_one_order(pool: Pool, schedule: str) -> None:
    for case in ("gpt2", "reuse", "russian"):
        run = Run(case, 2, 2, schedule, microbatches=4, steps=5)
        check_runs(pool, run, 2, tolerance=0)
