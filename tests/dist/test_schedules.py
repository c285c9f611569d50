"""Schedules beyond the two documented ones, and what the server makes of each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import _C
from smp.schedule import POLICIES
from tests.dist.pool import Pool
from tests.dist.training import SCHEDULES, Run, check_runs, strip
from tests.harness import train_step_of
from tests.reference.families import FAMILIES

NEW = [name for name in POLICIES if name not in SCHEDULES]


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", NEW)
@pytest.mark.parametrize("case", ["chain", "gpt2"])
def test_new_schedules_train_like_one_process(
    pool: Pool, case: str, schedule: str, pp: int
) -> None:
    check_runs(pool, [Run(case, pp, 1, schedule, microbatches=m) for m in (1, 4, 8)])


# ---- the executed order is the planned one -----------------------------------


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
    train = train_step_of(model, lambda model, x: model(x).mean())
    for _ in range(3):
        train(torch.ones(config["microbatches"], 4))
    lines: list[str] = smp.allgather(smp.metrics.executed_schedule(), smp.PP_GROUP)
    return "".join(f"{line}\n" for line in lines)


def write_partition(path: Path, pp: int, num_chunks: int) -> str:
    """Writes a partition with one block per stage, in order."""
    lines = ["smp partition v1", f"partitions {pp}", f"chunks {num_chunks}"]
    lines += [f"{i}  {i % pp}.{i // pp}" for i in range(pp * num_chunks)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def without_weights(text: str, rank: int) -> str:
    """Removes weight gradients of a rank from a schedule.

    The driver does its backward in one piece, since no rank waits for gradients of its inputs.
    """
    lines = text.splitlines()
    lines[rank] = " ".join(word for word in lines[rank].split() if word[0] != "W")
    return "".join(f"{line}\n" for line in lines)


def run_slow_chain(
    pool: Pool,
    folder: Path,
    pp: int,
    num_chunks: int,
    time_ms: tuple[int, int, int],
    slope: float,
    **config: Any,
) -> str:
    """Returns the schedule that a chain of one block per stage has executed.

    Args:
        time_ms: forward, gradient of the input, and gradient of the weight of a block.
        slope: share of the forward's time that each further rank saves.
    """
    config["microbatches"] = 2 * pp
    config["partition_file"] = write_partition(folder / "partition", pp, num_chunks)
    times = [
        (forward * (1 - slope * (s % pp)) / 1e3, backward / 1e3, weight / 1e3)
        for s in range(pp * num_chunks)
        for forward, backward, weight in [time_ms]
    ]
    texts = set(pool.run(pp, executed, pp, config, times))
    assert len(texts) == 1, texts
    return smp.schedule.normalize(texts.pop())


# Messages take time and plans do not know it: forwards that take a little less, or more, on later
# ranks keep tasks of two ranks from becoming ready in the same moment, in which a message would
# decide what goes first.
SLOPES = [
    ("simple", 2, -0.05),
    ("simple", 4, -0.05),
    ("interleaved", 2, 0.1),
    ("interleaved", 4, 0.1),
    ("virtual_interleaved", 2, 0.1),
    ("virtual_interleaved", 4, 0.1),
    ("zero_bubble", 2, -0.1),
    ("zero_bubble", 2, 0.1),  # a gap on the last rank, where a weight gradient is ready
    ("zero_bubble", 4, 0.1),
]


def test_each_policy_has_a_slope() -> None:
    assert {schedule for schedule, _, _ in SLOPES} == set(POLICIES)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(("schedule", "pp", "slope"), SLOPES)
def test_equal_slow_stages_execute_the_plan(
    pool: Pool, schedule: str, pp: int, slope: float, tmp_path: Path
) -> None:
    num_chunks = _C.make_policy(schedule).default_chunks
    active = {"active_microbatches": pp} if schedule == "interleaved" else {}
    plan = without_weights(smp.schedule.plan(schedule, pp, 2 * pp, num_chunks), 0)
    seen = []
    for _ in range(4):  # on a busy machine a message may still take longer than what is between
        times = (60, 40, 30)
        seen.append(
            run_slow_chain(
                pool, tmp_path, pp, num_chunks, times, slope, pipeline=schedule, **active
            )
        )
        if seen[-1] == plan:
            return
    pytest.fail(f"expected\n{plan}got\n" + "or\n".join(seen))


def test_zero_bubble_fills_gaps_and_puts_off_no_more_than_its_depth(
    pool: Pool, tmp_path: Path
) -> None:
    lines = run_slow_chain(
        pool, tmp_path, 4, 1, (20, 20, 20), 0.0, pipeline="zero_bubble"
    ).splitlines()
    for rank, line in enumerate(lines[1:], start=1):
        words = line.split()[1:]
        assert sorted(words) == sorted(f"{phase}{mb}" for phase in "FBW" for mb in range(8))
        pending = most = 0
        for word in words:
            pending += {"F": 0, "B": 1, "W": -1}[word[0]]
            most = max(most, pending)
        assert 1 <= most <= rank + 1, line
        for phase in "FBW":
            own = [word for word in words if word[0] == phase]
            assert own == [f"{phase}{mb}" for mb in range(8)], line
        assert all(words.index(f"B{mb}") < words.index(f"W{mb}") for mb in range(8)), line


# ---- families ----------------------------------------------------------------


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", NEW)
def test_new_schedules_end_and_train_families_like_one_process(
    pool: Pool, family: str, schedule: str
) -> None:
    for pp in (2, 4):
        check_runs(pool, [Run(family, pp, 1, schedule)])


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("family", FAMILIES)
def test_limits_of_interleaved_stop_no_family_whatever_its_graph(pool: Pool, family: str) -> None:
    for pp in (2, 4):
        check_runs(
            pool, [Run(family, pp, 1, config=(("active_microbatches", a),)) for a in (1, pp)]
        )


def test_replicas_agree_on_weight_gradients_in_one_order(pool: Pool) -> None:
    config = (("deterministic_server", True),)
    check_runs(pool, [Run("chain", 2, 2, schedule, config=config) for schedule in NEW])


class _Scale(torch.autograd.Function):
    """A function in Python; its class does not say whether it computes what is asked only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class _Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_Scale.apply(x, self.weight))


def _train_scaling(rank: int | None, pipeline: str = "") -> dict[str, Tensor]:
    net: Any = nn.Sequential(*(_Scaling() for _ in range(4)))
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    if rank is None:
        net(x).square().mean().backward()
        return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": pipeline})
    model: Any = smp.DistributedModel(net)
    train_step = train_step_of(model)
    train_step(x)
    model.zero_grad()
    train_step(x)  # without the hooks of the check of the first step
    return {name: p.grad.clone() for name, p in model.local_named_parameters()}


def test_zero_bubble_runs_the_backward_of_a_function_in_python(pool: Pool) -> None:
    """Checks that such a backward, and a hook as of the first step's check, runs once."""
    expected = _train_scaling(None)
    found: dict[str, Tensor] = {}
    for grads in pool.run(2, _train_scaling, "zero_bubble"):
        assert grads
        found |= {strip(name): grad for name, grad in grads.items()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 1e-6
        torch.testing.assert_close(found[name], grad)
