"""Two equal runs are bitwise equal, whatever arrives first."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.training import Run, assert_bitwise_equal, join_parts, train, train_all
from tests.harness import forward_step

DROPPING = Run("dropping", 2, 2, microbatches=8, manual=True)
# Gradients come in numbers that differ between microbatches, steps and replicas.
BRANCHES = Run("branches", 2, 2, microbatches=4, dtype=torch.float32, manual=True, steps=6)


def assert_same_numbers(a: list[Any], b: list[Any], run: Run, what: str) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.losses == right.losses, f"{what}: losses differ"
    for step in range(run.steps):
        assert_bitwise_equal(
            join_parts(a, run, str(step)), join_parts(b, run, str(step)), f"{what}: step {step}"
        )
    assert_bitwise_equal(
        join_parts(a, run, "params"), join_parts(b, run, "params"), f"{what}: parameters"
    )


def train_seeded(rank: int, run: Run, sleepy: int) -> Any:
    """Trains with a fixed seed; the forward of rank `sleepy` dawdles irregularly."""
    import smp
    from tests.reference import models

    torch.manual_seed(1234)
    plain = models.Affine.forward

    def slow(self: Any, x: torch.Tensor) -> torch.Tensor:
        if rank == sleepy:
            time.sleep(0.002 * (int(time.monotonic_ns() / 1000) % 7))
        return plain(self, x)

    models.Affine.forward = slow  # type: ignore[method-assign]
    try:
        record = train(rank, run)
    finally:
        models.Affine.forward = plain  # type: ignore[method-assign]
    smp.shutdown()
    return record


@pytest.mark.parametrize("case", ["gpt2", "branches", "zigzag"])
def test_two_equal_runs_are_bitwise_equal(pool: Pool, case: str) -> None:
    run = Run(case, 2, 2, microbatches=4, dtype=torch.float32, manual=True)
    first, second = zip(*pool.run(4, train_all, [run, run]), strict=True)
    assert_same_numbers(list(first), list(second), run, f"two runs of {run}")


@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_runs_with_dropout_are_bitwise_equal_whoever_is_slow(pool: Pool, schedule: str) -> None:
    run = replace(DROPPING, schedule=schedule)
    runs = [pool.run(4, train_seeded, run, sleepy) for sleepy in (-1, 0, 1, 3)]
    for other in runs[1:]:
        assert_same_numbers(runs[0], other, run, f"{run} with one slow rank")


def test_varying_numbers_of_gradients_are_added_in_one_order_whoever_is_slow(pool: Pool) -> None:
    runs = [pool.run(4, train_seeded, BRANCHES, sleepy) for sleepy in (-1, 0, 1, 2, 3)]
    for other in runs[1:]:
        assert_same_numbers(runs[0], other, BRANCHES, f"{BRANCHES} with one slow rank")


def test_schedules_give_bitwise_equal_results_with_dropout(pool: Pool) -> None:
    interleaved = pool.run(4, train_seeded, DROPPING, -1)
    simple = pool.run(4, train_seeded, replace(DROPPING, schedule="simple"), -1)
    assert_same_numbers(interleaved, simple, DROPPING, "interleaved and simple")


def test_dropout_differs_between_microbatches_steps_and_replicas(pool: Pool) -> None:
    masks = pool.run(4, collect_masks)
    seen = [mask for rank_masks in masks for mask in rank_masks]
    assert len(seen) == 4 * 2 * 4  # ranks x steps x microbatches
    driver = [tuple(m) for i, rank_masks in enumerate(masks) if i in (0, 2) for m in rank_masks]
    assert len(set(driver)) == len(driver), "a dropout mask was drawn twice"


def collect_masks(rank: int) -> list[list[float]]:
    import smp
    from tests.dist.training import init

    torch.manual_seed(5)
    init(Run("dropping", 2, 2, microbatches=4, manual=True))

    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with smp.partition(1):
                self.remote = torch.nn.Linear(40, 40)
            self.local = torch.nn.Linear(40, 40)
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(torch.ones_like(self.local(self.remote(x))))

    model = smp.DistributedModel(Noise())
    forward = forward_step(model)
    masks: list[list[float]] = []
    for _ in range(2):
        with torch.no_grad():
            masks += [out.flatten().tolist() for out in forward(torch.ones(4, 40)).outputs]
    return masks


@pytest.mark.sample(keep=0)
def test_deterministic_server_executes_one_order_on_all_replicas(pool: Pool) -> None:
    run = replace(DROPPING, config=(("deterministic_server", True),))
    for sleepy in (-1, 1, 2):
        records = pool.run(4, train_seeded, run, sleepy)
        for pp_rank in range(run.pp):
            orders = [r.executed for r in records if r.pp_rank == pp_rank]
            assert orders[0], "no task was recorded"
            assert orders[0] == orders[1], f"replicas of pp_rank {pp_rank} ran different orders"
            # Messages bring the ends of microbatches at any time; sums of gradients leave then.
            ends = [task for task in orders[0] if task.endswith(":m-4")]
            assert sorted(ends) == [f"B{mb}:m-4" for mb in range(run.microbatches)]
    free = pool.run(4, train_seeded, DROPPING, -1)
    assert_same_numbers(records, free, run, "deterministic_server on and off")
