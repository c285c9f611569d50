"""Families with distributed modules on CUDA devices. Without one these tests are skipped.

One device runs them with degree 1: every fused kernel, no exchange. Split layers need a device
each, because NCCL takes one rank per device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.split_training import MODES, SplitRun, check_run, train_split
from tests.reference.split_families import SPLIT_FAMILIES

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
DTYPES = (torch.float64, torch.float32)

pytestmark = pytest.mark.skipif(NUM_DEVICES == 0, reason="no CUDA device")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def check(pool: Pool, run: SplitRun) -> None:
    env = {"SMP_DEVICE": "cuda"}
    results = pool.run(run.world_size, train_split, [run], timeout=300, env=env)
    check_run(run, [records[0] for records in results])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_family_on_one_gpu_trains_like_one_process_on_the_cpu(
    pool: Pool, case: str, dtype: torch.dtype
) -> None:
    check(pool, SplitRun(case, 1, 1, 1, dtype=dtype))


@pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("optimize", "prescaled"), MODES)
@pytest.mark.parametrize("case", SPLIT_FAMILIES)
def test_split_family_on_two_gpus_trains_like_one_process_on_the_cpu(
    pool: Pool, case: str, optimize: str, prescaled: int, dtype: torch.dtype
) -> None:
    check(pool, SplitRun(case, 1, 2, 1, optimize, bool(prescaled), dtype=dtype))
