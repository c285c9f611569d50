"""Schedules beyond the two documented ones, and what the server makes of each."""

from __future__ import annotations

import pytest

from tests.dist.pool import Pool
from tests.dist.training import Run, check_runs

NEW = ("virtual_interleaved", "zero_bubble")


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", NEW)
@pytest.mark.parametrize("case", ["chain", "gpt2"])
def test_new_schedules_train_like_one_process(
    pool: Pool, case: str, schedule: str, pp: int
) -> None:
    check_runs(pool, [Run(case, pp, 1, schedule, microbatches=m) for m in (1, 4, 8)])
