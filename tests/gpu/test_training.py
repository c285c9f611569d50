"""The contract of tests/dist on the device.

Pipeline ranks may share a GPU (``SMP_SHARE_GPU=1``), so one is enough for them; replicas need a GPU
each, because NCCL takes one rank per device.
"""

from __future__ import annotations

import pytest

from tests.dist.grid.cells import Cell
from tests.dist.grid.judging import check as check_cell
from tests.dist.grid.training import train_cell
from tests.dist.pool import Pool
from tests.dist.training import Run, check_against_reference, train_all
from tests.gpu.device import ENV, needs_four_devices


def check(pool: Pool, run: Run) -> None:
    results = pool.run(run.world_size, train_all, [run], env=ENV)
    check_against_reference([records[0] for records in results], run)


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("case", ["gptj", "gpt2", "bert"])
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_pipeline_on_one_device_trains_like_one_process_on_the_cpu(
    pool: Pool, case: str, schedule: str
) -> None:
    # Lifted: in float32, where models of transformers compute a few things, devices differ.
    check(pool, Run(case, 2, 1, schedule=schedule, microbatches=4, lifted=True))


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("checkpointing", ["none", "each"])
@pytest.mark.parametrize("pp", [1, 2])
def test_precisions_on_one_device_train_like_one_process_on_the_cpu(
    pool: Pool, pp: int, checkpointing: str, precision: str
) -> None:
    cell = Cell(pp, 1, 1, "none", precision, checkpointing, offload=checkpointing != "none")
    check_cell(cell, pool.run(cell.world_size, train_cell, cell, env=ENV))


@needs_four_devices
@pytest.mark.parametrize("case", ["gptj", "gpt2"])
def test_replicas_on_gpus_train_like_one_process_on_the_cpu(pool: Pool, case: str) -> None:
    check(pool, Run(case, 2, 2, microbatches=4, lifted=True))
