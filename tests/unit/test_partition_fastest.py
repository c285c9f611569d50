"""The fastest partition that fits: against all cuts of a chain, and under a memory limit."""

from __future__ import annotations

import itertools
import logging
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from smp import _C
from smp.config.schema import Config as SmpConfig
from smp.partition.decide import Fastest, decide, partition_options
from smp.partition.decision import Decision
from smp.partition.explain import explain
from smp.partition.fastest import StepShape, candidate, choose
from smp.partition.room import device_room_bytes, state_factor
from smp.partition.tree import ModuleIndex, build_tree
from tests.unit.test_partition_decide import Config

PARAM_BYTES = 80  # of one module of a chain


def chain(costs: Sequence[float], activation_bytes: int = 10) -> ModuleIndex:
    """Modules of these costs, a third of them in forwards, one after the other."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in costs))
    index = build_tree(model)
    for idx, cost in enumerate(costs, 1):
        index.tree.set_costs(idx, cost, activation_bytes, cost / 3)
        index.tree.add_value(idx - 1, 8, [idx], idx > 1)
    index.tree.set_order(range(len(costs) + 1))
    return index


def cuts(num_modules: int, ranks: int) -> Iterator[list[int]]:
    """Partition per node of a chain, for every cut."""
    for ends in itertools.combinations(range(1, num_modules), ranks - 1):
        yield [0, *(sum(i >= end for end in ends) for i in range(num_modules))]


def best_of_all(
    index: ModuleIndex,
    ranks: int,
    shape: StepShape,
    options: _C.PartitionOptions | None = None,
) -> float:
    options = options or _C.PartitionOptions(ranks)
    found = (
        candidate(index.tree, _C.make_assignment(index.tree, ranks, idxs), options, shape)
        for idxs in cuts(len(index.modules) - 1, ranks)
    )
    return min(c.step_ratio for c in found if c.step_ratio is not None)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("policy", ["interleaved", "simple", "zero_bubble"])
def test_step_is_as_short_as_that_of_the_best_of_all_cuts(policy: str, ranks: int) -> None:
    choices = random.Random(3)
    excess = []
    for microbatches in (2, 4, 8, 16, 64):
        usual = _C.make_policy(policy).default_active_microbatches(ranks, microbatches)
        for active in {usual, usual if policy == "simple" else ranks}:
            index = chain([choices.uniform(1, 3) for _ in range(12)])
            shape = StepShape(policy, microbatches, min(active, microbatches))
            found = decide_fastest(index, ranks, Fastest(shape)).step_ratio
            assert found is not None
            excess.append(found / best_of_all(index, ranks, shape))
    assert min(excess) > 1 - 1e-9
    assert max(excess) < 1.1, excess  # few modules: the next cut may be far away
    assert sum(excess) / len(excess) < 1.02, excess


def decide_fastest(
    index: ModuleIndex, ranks: int, fastest: Fastest, **limits: Sequence[float]
) -> Decision:
    shape = fastest.shape
    config = Config(pipeline=shape.policy, microbatches=shape.microbatches)
    config = replace(config, active_microbatches=shape.active)
    return decide(index.modules[0], config, ranks, index=index, fastest=fastest, **limits)


def held(decision: Decision) -> list[int]:
    return [rank.memory_bytes for rank in explain(decision).ranks]


SHAPE = StepShape("interleaved", 8, 4)


def test_time_counts_and_not_memory_as_long_as_that_fits() -> None:
    index = chain([1.0] * 6 + [3.0] * 2, activation_bytes=0)
    free = decide_fastest(index, 2, Fastest(SHAPE))
    assert free.load_bytes == (6 * PARAM_BYTES, 2 * PARAM_BYTES), "as much time on each rank"
    weighed = decide(index.modules[0], Config(memory_weight=0.8), 2, index=index)
    ratio = candidate(index.tree, weighed.assignment, partition_options(Config(), 2), SHAPE)
    assert free.step_ratio is not None and ratio.step_ratio is not None
    assert free.step_ratio < 0.9 * ratio.step_ratio, "what was taken before"
    limit = 5 * PARAM_BYTES * 4
    for limited in (
        decide_fastest(index, 2, Fastest(SHAPE, rooms=(limit, limit))),
        decide_fastest(index, 2, Fastest(SHAPE), memory_limits=(limit, limit)),
    ):
        assert limited.load_bytes == (5 * PARAM_BYTES, 3 * PARAM_BYTES)
        assert max(held(limited)) <= limit < max(held(free))


def test_least_memory_is_taken_and_told_where_nothing_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    index = chain([1.0] * 6 + [3.0] * 2, activation_bytes=0)
    limit = 3 * PARAM_BYTES * 4
    with caplog.at_level(logging.WARNING, logger="smp"):
        decision = decide_fastest(index, 2, Fastest(SHAPE, rooms=(limit, limit)))
    assert decision.load_bytes == (4 * PARAM_BYTES, 4 * PARAM_BYTES)
    (record,) = caplog.records
    assert "no partition was found that fits" in record.message
    with pytest.raises(ValueError, match=f"more than the limit of {limit}"):
        decide_fastest(index, 2, Fastest(SHAPE, rooms=(limit, limit)), memory_limits=(limit, limit))


def test_ranks_in_front_do_more_where_more_microbatches_are_in_flight() -> None:
    index = chain([1.0] * 12)
    ahead = explain(decide_fastest(index, 2, Fastest(StepShape("interleaved", 4, 4))))
    assert ahead.ranks[0].compute_share > 0.55
    strict = explain(decide_fastest(index, 2, Fastest(StepShape("interleaved", 16, 2))))
    assert strict.ranks[0].compute_share == pytest.approx(0.5)
    assert "of the time of ranks that never wait" in str(strict)
    module = explain(decide_fastest(index, 2, Fastest(SHAPE)), "3").module
    assert module is not None and "such that a step is shortest" in module.reason


def test_many_microbatches_are_extrapolated() -> None:
    index = chain([1.0] * 12)
    options = _C.PartitionOptions(2)
    idxs = [0] + [0] * 7 + [1] * 5
    assignment = _C.make_assignment(index.tree, 2, idxs)
    found = candidate(index.tree, assignment, options, StepShape("interleaved", 1000, 4))
    assert found.step_ratio == pytest.approx(7 / 6, rel=0.01)


def test_of_equally_fast_partitions_the_one_with_less_memory_is_taken() -> None:
    index = chain([1.0] * 4)
    options = _C.PartitionOptions(2)
    assignment = _C.make_assignment(index.tree, 2, [0, 0, 0, 1, 1])
    first = candidate(index.tree, assignment, options, SHAPE)
    small = replace(first, memory_bytes=first.memory_bytes / 2)
    assert choose([first, small]) is small
    assert first.step_ratio is not None
    slow = replace(small, step_ratio=1.01 * first.step_ratio, memory_bytes=0.0)
    assert choose([first, small, slow]) is small


def test_without_a_trace_memory_is_balanced() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    decision = decide(model, Config(), 2, fastest=Fastest(SHAPE))
    assert decision.load_bytes == (2 * PARAM_BYTES, 2 * PARAM_BYTES)
    assert decision.step_ratio is None


@pytest.mark.parametrize(
    ("keys", "dtype", "shard_size", "factor"),
    [
        ({}, torch.float32, 1, 4.0),
        ({}, torch.bfloat16, 1, 4.0),
        ({"shard_optimizer_state": True}, torch.float32, 4, 1.75),
        ({"bf16": True}, torch.float32, 1, 4.5),
        ({"bf16": True}, torch.bfloat16, 1, 9.0),
        ({"bf16": True, "shard_optimizer_state": True}, torch.float32, 2, 2.5),
        ({"sharded_data_parallel_degree": 2}, torch.float32, 2, 2.0),
        ({"sharded_data_parallel_degree": 8}, torch.float32, 8, 1.0),
    ],
)
def test_state_takes_what_the_page_on_memory_says(
    keys: dict[str, object], dtype: torch.dtype, shard_size: int, factor: float
) -> None:
    config = SmpConfig.from_dict({"ddp": True, **keys})
    parameters = nn.Linear(4, 4, dtype=dtype).parameters()
    assert state_factor(parameters, config, shard_size) == factor


def test_ranks_of_a_host_share_its_memory() -> None:
    one = device_room_bytes(torch.device("cpu"), 1)
    assert 1e8 < one < 1e14
    assert device_room_bytes(torch.device("cpu"), 2) == pytest.approx(one / 2, rel=1e-6)


SPEEDS = [(1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 3.0), (4.0, 1.0, 2.0)]


@pytest.mark.parametrize("speeds", SPEEDS)
def test_step_on_uneven_devices_is_as_short_as_that_of_the_best_of_all_cuts(
    speeds: tuple[float, ...],
) -> None:
    choices = random.Random(5)
    excess, gains = [], []
    for policy in ("interleaved", "zero_bubble"):
        for microbatches in (4, 8, 16):
            index = chain([choices.uniform(1, 3) for _ in range(12)])
            shape = StepShape(policy, microbatches, min(5, microbatches))
            options = _C.PartitionOptions(3, speeds=speeds)
            found = decide_fastest(index, 3, Fastest(shape), speeds=speeds).step_ratio
            alike = decide_fastest(index, 3, Fastest(shape))
            unaware = candidate(index.tree, alike.assignment, options, shape).step_ratio
            assert found is not None and unaware is not None
            excess.append(found / best_of_all(index, 3, shape, options))
            gains.append(unaware / found)
    assert min(excess) > 1 - 1e-9
    assert sorted(excess)[-2] < 1.01 and max(excess) < 1.06, excess
    assert min(gains) > 1.1 and statistics.median(gains) > 1.2, gains


def test_less_room_on_one_rank_moves_modules_to_others() -> None:
    index = chain([1.0] * 12, activation_bytes=0)
    fits = 4 * 2 * PARAM_BYTES + 50  # two modules with gradients and optimizer state
    ample = 100 * fits
    for rooms in ((fits, ample, ample), (ample, fits, ample), (ample, ample, fits)):
        decision = decide_fastest(index, 3, Fastest(SHAPE, rooms=rooms))
        small = rooms.index(fits)
        assert decision.load_bytes[small] == 2 * PARAM_BYTES
        assert held(decision)[small] <= fits and sum(decision.load_bytes) == 12 * PARAM_BYTES
        hard = decide_fastest(index, 3, Fastest(SHAPE), memory_limits=rooms)
        assert hard.load_bytes == decision.load_bytes
    with pytest.raises(ValueError, match="320 more than the limit of 1600"):
        decide_fastest(index, 3, Fastest(SHAPE), memory_limits=(1600, 400, 1600))
