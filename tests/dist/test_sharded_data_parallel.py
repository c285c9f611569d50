"""Sharded data parallelism equals plain data parallelism, and nothing stays whole."""

from __future__ import annotations

import os

import pytest
import torch

from smp.model import engine_of
from tests.dist.pool import Pool
from tests.dist.sharded_training import SHARDED, check_equal, check_runs, sharded, train
from tests.dist.training import Run

FP64 = torch.float64


def run_of(case: str, pp: int, dp: int, dtype: torch.dtype = FP64, microbatches: int = 2) -> Run:
    return Run(case, pp, dp, microbatches=microbatches, dtype=dtype, steps=5)


@pytest.mark.parametrize("case", ["chain", "reuse", "gpt2", "bert"])
def test_two_ranks_get_bit_by_bit_what_plain_data_parallelism_gives(pool: Pool, case: str) -> None:
    check_runs(pool, run_of(case, 1, 2, microbatches=1), 2, tolerance=0)


def test_gathering_ahead_changes_no_bit(pool: Pool) -> None:
    run = run_of("gpt2", 1, 2, microbatches=1)
    (parts, _) = check_runs(pool, run, 2, tolerance=0, sdp_max_live_parameters=1)
    assert parts.stats["num_hits"] == 0


def test_every_microbatch_is_reduced(pool: Pool) -> None:
    """Sums over ranks come before those over microbatches, hence not bit by bit."""
    check_runs(pool, run_of("gpt2", 1, 2, microbatches=3), 2, tolerance=1e-9)


@pytest.mark.sample(keep=0)
def test_four_ranks_as_two_copies_or_one(pool: Pool) -> None:
    for degree in (2, 4):
        check_runs(pool, run_of("gpt2", 1, 4, microbatches=1), degree, tolerance=1e-9)


def test_updates_clip_gradients_to_their_norm_over_all_shards(pool: Pool) -> None:
    check_runs(pool, run_of("gpt2", 1, 4), 2, tolerance=1e-9, clip=0.05)


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_half_precision(pool: Pool, key: str) -> None:
    """Masters, gradients and updates are those of plain data parallelism."""
    run = Run("gpt2", 1, 2, microbatches=1, dtype=torch.float32, steps=5, config=((key, True),))
    check_runs(pool, run, 2, tolerance=0)


def test_float32_with_a_large_epsilon(pool: Pool) -> None:
    check_runs(pool, run_of("gptj", 1, 4, torch.float32), 4, tolerance=1e-6)


@pytest.mark.parametrize(
    ("schedule", "cases"), [("interleaved", ("gpt2", "nested")), ("simple", ("reuse",))]
)
def test_with_a_pipeline_gathers_follow_one_order(
    pool: Pool, schedule: str, cases: tuple[str, ...]
) -> None:
    for case in cases:
        check_runs(pool, Run(case, 2, 2, schedule, microbatches=4, steps=3), 2, tolerance=0)


def test_a_block_may_be_cut_inside(pool: Pool) -> None:
    # One rank runs the forward of the block, the other one parts of it only.
    for placed in (
        (("transformer.h.2.mlp", 1),),
        (("transformer.h.2", 0), ("transformer.h.2.attn", 1)),
    ):
        run = Run("gpt2", 2, 2, "interleaved", microbatches=2, steps=2, placed=placed)
        check_runs(pool, run, 2, tolerance=0)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pipeline", ["zero_bubble", "virtual_interleaved"])
def test_with_other_schedules(pool: Pool, pipeline: str) -> None:
    run = Run("gpt2", 2, 2, pipeline, microbatches=4, steps=3)
    check_runs(pool, run, 2, tolerance=0)


def test_with_tensor_parallelism_slices_are_sharded(pool: Pool) -> None:
    keys = (("tensor_parallel_degree", 2),)
    run = Run("gptj", 1, 4, microbatches=2, steps=3, config=keys)
    check_runs(pool, run, 2, tolerance=1e-9)


def train_on_hosts(rank: int, run: Run) -> object:
    import smp

    os.environ["SMP_HOSTNAME"] = "ab"[rank // 2]
    try:
        result = train(rank, run)
        from smp.world import runtime

        by_hosts = runtime.current().rank.comms.by_hosts
        smp.shutdown()
        return result, by_hosts.get("shard")
    finally:
        del os.environ["SMP_HOSTNAME"]


def test_gathers_between_hosts_first_give_the_same(pool: Pool) -> None:
    run = run_of("chain", 1, 4, microbatches=1)
    results = []
    for hierarchical in (True, False):
        keys = {"sdp_hierarchical_allgather": hierarchical}
        ranks = pool.run(4, train_on_hosts, sharded(run, 4, **keys))
        assert all(by_hosts == ((2, 2) if hierarchical else None) for _, by_hosts in ranks)
        results.append([result for result, _ in ranks])
    check_equal(results[0], results[1], 0)


def bucket_counts(rank: int, cases: list[tuple[dict[str, int], float]]) -> list[int]:
    """Buckets of gradients of four layers with 1024 elements each."""
    import smp

    counts = []
    for config, cap_mb in cases:
        smp.init({"ddp": True, "sharded_data_parallel_degree": 2, **SHARDED, **config})
        layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(4)]
        model = smp.DistributedModel(torch.nn.Sequential(*layers), bucket_cap_mb=cap_mb)
        counts.append(sum(reducer.num_buckets for reducer in engine_of(model).gradients.reducers))
        smp.shutdown()
    return counts


def test_buckets_are_as_large_as_both_settings_allow(pool: Pool) -> None:
    kib = 1 / 1024
    cases: list[tuple[dict[str, int], float]] = [
        ({}, 25),
        ({"sdp_reduce_bucket_size": 2048}, 25),
        ({"sdp_reduce_bucket_size": 1024}, 25),
        ({"sdp_reduce_bucket_size": 4096}, 16 * kib),  # half of it: 2048 elements
        ({"sdp_reduce_bucket_size": 4096}, 32 * kib),
    ]
    for counts in pool.run(2, bucket_counts, cases):
        assert counts == [1, 2, 4, 2, 1]
