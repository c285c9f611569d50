"""Unmodified Hugging Face models give the numbers of one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.training import LAYOUTS, MICROBATCHES, SCHEDULES, Run, check_runs
from tests.samples import SAMPLES

CASES = ("gptj", "gpt2", "bert")
VARIANTS = tuple(itertools.product(SCHEDULES, MICROBATCHES))


def variants_of(case: str) -> tuple[tuple[str, int], ...]:
    """Schedules and numbers of microbatches that a case trains with.

    In `make test` each schedule and each number, with another one in the next case: two cases have
    all pairs. Elsewhere each case has all of them.
    """
    if SAMPLES != "some":
        return VARIANTS
    first = CASES.index(case)
    return tuple(
        (SCHEDULES[(first + idx) % len(SCHEDULES)], microbatches)
        for idx, microbatches in enumerate(MICROBATCHES)
    )


def test_two_cases_train_with_all_pairs() -> None:
    assert {*variants_of(CASES[0]), *variants_of(CASES[1])} == set(VARIANTS)


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_auto_partition_trains_like_one_process_in_fp64(
    pool: Pool, case: str, pp: int, dp: int
) -> None:
    # The loss is computed inside the model: other ranks' inputs are not read.
    variants = variants_of(case)
    check_runs(pool, [Run(case, pp, dp, s, mb, dummies=mb == 4) for s, mb in variants])


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
def test_hf_models_train_like_one_process_in_fp32(pool: Pool, pp: int, dp: int) -> None:
    check_runs(pool, [Run(case, pp, dp, dtype=torch.float32) for case in CASES])


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 2)])
def test_manual_partition_of_layers_trains_like_one_process(pool: Pool, pp: int, dp: int) -> None:
    check_runs(pool, [Run(case, pp, dp, manual=True, dummies=True) for case in CASES])
