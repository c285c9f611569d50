"""Unmodified Hugging Face models give the numbers of one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.training import LAYOUTS, MICROBATCHES, SCHEDULES, Run, check_runs

CASES = ("gptj", "gpt2", "bert")
VARIANTS = tuple(itertools.product(SCHEDULES, MICROBATCHES))


@pytest.mark.sample(keep=3)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_auto_partition_trains_like_one_process_in_fp64(
    pool: Pool, case: str, pp: int, dp: int
) -> None:
    # The loss is computed inside the model: other ranks' inputs are not read.
    check_runs(pool, [Run(case, pp, dp, s, mb, dummies=mb == 4) for s, mb in VARIANTS])


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
def test_hf_models_train_like_one_process_in_fp32(pool: Pool, pp: int, dp: int) -> None:
    check_runs(pool, [Run(case, pp, dp, dtype=torch.float32) for case in CASES])


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 2)])
def test_manual_partition_of_layers_trains_like_one_process(pool: Pool, pp: int, dp: int) -> None:
    check_runs(pool, [Run(case, pp, dp, manual=True, dummies=True) for case in CASES])
