"""Schedules beyond the two documented ones, and what the server makes of each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
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


# ---- the executed order is the planned one -----------------------------------

BASE_S = 0.03


class Slow(torch.autograd.Function):
    """The identity, with time to pass each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class SlowBlock(nn.Module):
    """Takes a time for forward, gradient of the input, and gradient of the weight."""

    def __init__(self, forward_s: float, backward_s: float, weight_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = (forward_s, backward_s, weight_s)

    def forward(self, x: Tensor) -> Tensor:
        forward_s, backward_s, weight_s = self.times
        weight = Slow.apply(self.linear.weight, 0.0, weight_s)
        return nn.functional.linear(Slow.apply(x, forward_s, backward_s), weight)


def executed(
    rank: int, pp: int, config: dict[str, Any], times: list[tuple[float, float, float]]
) -> str:
    """The schedule of the last of three steps; the first two teach the callers what comes."""
    import smp

    smp.init({"pipeline_parallel_degree": pp, "skip_tracing": True} | config)
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(SlowBlock(*each) for each in times)))

    @smp.step
    def train(x: Tensor) -> None:
        model.backward(model(x).mean())

    for _ in range(3):
        train(torch.ones(config["microbatches"], 4))
    lines: list[str] = smp.allgather(smp.metrics.executed_schedule(), smp.PP_GROUP)
    return "".join(f"{line}\n" for line in lines)


def write_partition(path: Path, pp: int, num_chunks: int) -> str:
    """One block per stage, in order."""
    lines = ["smp partition v1", f"partitions {pp}", f"chunks {num_chunks}"]
    lines += [f"{i}  {i % pp}.{i // pp}" for i in range(pp * num_chunks)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["simple", "interleaved", *NEW])
def test_equal_slow_stages_execute_the_plan(
    pool: Pool, schedule: str, pp: int, tmp_path: Path
) -> None:
    num_chunks = 2 if schedule == "virtual_interleaved" else 1
    num_microbatches = 2 * pp
    config: dict[str, Any] = {
        "pipeline": schedule,
        "microbatches": num_microbatches,
        "partition_file": write_partition(tmp_path / "partition", pp, num_chunks),
    }
    if schedule == "interleaved":
        config["active_microbatches"] = pp
    num_stages = pp * num_chunks
    times = [(BASE_S, BASE_S, BASE_S) for s in range(num_stages)]
    lines = set(pool.run(pp, executed, pp, config, times))
    planned = smp.schedule.plan(schedule, pp, num_microbatches, num_chunks)
    print(lines.pop())
    print(planned)
    assert 0
