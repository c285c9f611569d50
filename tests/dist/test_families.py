"""Model families, partitioned by the library, give the numbers of one process.

Default settings of the installed transformers (attention caches included), dropout off; see
`tests/reference/families.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.older import OLDER, OLDER_FOLDER
from tests.dist.pool import Pool
from tests.dist.training import (
    SCHEDULES,
    RankRecord,
    Run,
    assert_bitwise_equal,
    check_against_reference,
    check_runs,
    check_was_distributed,
    join_parts,
    train,
    train_all,
)
from tests.reference.families import CAUSAL, FAMILIES
from tests.reference.hybrid_families import HYBRID
from tests.reference.single_process import train_reference

WITH_CACHE = (*CAUSAL, "hf/t5")
WITH_DROPOUT = (
    "hf/gpt2+nocache",
    "hf/bert",
    "hf/roberta",
    "hf/t5+nocache",
    "nn/transformer",
    "moe",
    "tree",
)


def run_of(case: str, pp: int, schedule: str = "interleaved", **config: Any) -> Run:
    return Run(case, pp, 1, schedule, config=tuple(config.items()))


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_like_one_process(pool: Pool, family: str, pp: int) -> None:
    check_runs(pool, [run_of(family, pp, schedule) for schedule in SCHEDULES])


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("family", WITH_CACHE)
def test_family_trains_like_one_process_without_attention_cache(
    pool: Pool, family: str, pp: int
) -> None:
    check_runs(pool, [run_of(f"{family}+nocache", pp)])


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("family", HYBRID)
def test_family_with_states_beside_keys_and_values_trains_like_one_process(
    pool: Pool, family: str, pp: int
) -> None:
    # The default use_cache: convolutions and recurrences leave their states in it.
    check_runs(pool, [run_of(family, pp)])


# ---- dropout ---------------------------------------------------------------


def train_seeded(rank: int, runs: list[Run]) -> list[RankRecord]:
    """Trains each run with the same seed, init and shutdown."""
    import smp

    records = []
    for run in runs:
        torch.manual_seed(1234)
        try:
            records.append(train(rank, run))
        except Exception as error:
            error.add_note(f"while running {run}")
            raise
        smp.shutdown()
    return records


def assert_same_numbers(a: list[RankRecord], b: list[RankRecord], run: Run, what: str) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.losses == right.losses, f"{what}: losses differ"
    for kind in (*map(str, range(run.steps)), "params"):
        assert_bitwise_equal(join_parts(a, run, kind), join_parts(b, run, kind), f"{what}: {kind}")


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_dropout_depends_on_the_seed_and_not_on_the_schedule(pool: Pool, family: str) -> None:
    case = f"{family}+dropout"
    # A schedule keeps activations of its own number of microbatches, so with memory in the balance
    # the partition would depend on it, and random numbers are a function of the partition.
    first = run_of(case, 2, memory_weight=0.0)
    others = [first] + [run_of(case, 2, name, memory_weight=0.0) for name in SCHEDULES[1:]]
    results: list[Any] = pool.run(2, train_seeded, [first, *others])
    records = [[rank[i] for rank in results] for i in range(1 + len(others))]
    check_was_distributed(records[0], first)
    without = train_reference(family, first.dtype, 1, first.microbatches).losses[0][0]
    assert records[0][0].losses[0] != pytest.approx(without), "dropout changed nothing"
    for run, other in zip(others, records[1:], strict=True):
        assert_same_numbers(records[0], other, run, f"{first} and {run}")


# ---- an older transformers ---------------------------------------------------

OLDER_FAMILIES = ("hf/gpt2", "hf/gptj", "hf/bert", "hf/roberta", "hf/t5")


def judge(rank: int, runs: list[Run], results: list[list[RankRecord]]) -> tuple[str, str]:
    """Compares with one process, under the pool's transformers; returns its version and file."""
    import transformers

    for index, run in enumerate(runs):
        check_against_reference([records[index] for records in results], run)
    return transformers.__version__, str(transformers.__file__)


@pytest.mark.sample(keep=2)
@pytest.mark.covering(times=1)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("family", OLDER_FAMILIES)
def test_family_trains_like_one_process_with_transformers_4_30_2(
    older_pool: Pool, family: str, pp: int
) -> None:
    runs = [run_of(family, pp, schedule) for schedule in SCHEDULES]
    results = older_pool.run(pp, train_all, runs)
    [(version, file)] = older_pool.run(1, judge, runs, results)
    assert version == OLDER and Path(file).is_relative_to(OLDER_FOLDER)
