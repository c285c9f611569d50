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
