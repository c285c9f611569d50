"""Families with distributed modules on the device.

One device runs them with degree 1: every fused kernel, no exchange. Split layers need a device
each, because NCCL takes one rank per device.
"""

from __future__ import annotations

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.split_training import MODES, SplitRun, check_run, train_split
from tests.gpu.device import ENV, needs_two_devices
from tests.reference.split_families import SPLIT_FAMILIES

DTYPES = (torch.float64, torch.float32)


def check(pool: Pool, run: SplitRun) -> None:
    env = {**ENV, "SMP_SHARE_GPU": "0"}
    results = pool.run(run.world_size, train_split, [run], env=env)
    check_run(run, [records[0] for records in results])


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_family_on_one_device_trains_like_one_process_on_the_cpu(
    pool: Pool, case: str, dtype: torch.dtype
) -> None:
    check(pool, SplitRun(case, 1, 1, 1, dtype=dtype))


@needs_two_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("optimize", "prescaled"), MODES)
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_split_family_on_two_gpus_trains_like_one_process_on_the_cpu(
    pool: Pool, case: str, optimize: str, prescaled: int, dtype: torch.dtype
) -> None:
    check(pool, SplitRun(case, 1, 2, 1, optimize, bool(prescaled), dtype=dtype))
