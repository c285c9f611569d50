"""The contract of tests/dist on a CUDA device. Without one these tests are skipped.

Pipeline ranks may share a GPU (``SMP_SHARE_GPU=1``), so one device is enough for them; replicas
need a device each, because NCCL takes one rank per device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.training import Run, check_against_reference, train_all

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
ENV = {"SMP_DEVICE": "cuda", "SMP_SHARE_GPU": "1"}

pytestmark = pytest.mark.skipif(NUM_DEVICES == 0, reason="no CUDA device")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def check(pool: Pool, run: Run) -> None:
    results = pool.run(run.world_size, train_all, [run], timeout=300, env=ENV)
    check_against_reference([records[0] for records in results], run)


@pytest.mark.parametrize("case", ["gptj", "gpt2", "bert"])
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_pipeline_on_one_gpu_trains_like_one_process_on_the_cpu(
    pool: Pool, case: str, schedule: str
) -> None:
    check(pool, Run(case, 2, 1, schedule=schedule, microbatches=4))


@pytest.mark.skipif(NUM_DEVICES < 4, reason="needs four CUDA devices")
@pytest.mark.parametrize("case", ["gptj", "gpt2"])
def test_replicas_on_gpus_train_like_one_process_on_the_cpu(pool: Pool, case: str) -> None:
    check(pool, Run(case, 2, 2, microbatches=4))
