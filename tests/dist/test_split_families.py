"""Families with split layers train like their plain models in one process."""

from __future__ import annotations

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.split_training import LAYOUTS, MODES, SplitRun, check_runs
from tests.reference.split_families import SPLIT_FAMILIES


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "pp{}-tp{}-rdp{}".format(*layout))
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_split_family_trains_like_one_process(
    pool: Pool, case: str, layout: tuple[int, int, int]
) -> None:
    check_runs(pool, [SplitRun(case, *layout, mode, bool(scaled)) for mode, scaled in MODES])


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_split_family_trains_like_one_process_in_fp32(pool: Pool, case: str) -> None:
    runs = [
        SplitRun(case, 1, 2, 2, mode, bool(scaled), dtype=torch.float32) for mode, scaled in MODES
    ]
    check_runs(pool, runs)
