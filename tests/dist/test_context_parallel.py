"""Blocks of own models that compute parts of sequences (``context_parallel_degree``).

Whatever they do, numbers are those of one process on whole sequences. A block that mixes tokens
outside of attention computes whole sequences on every rank, and a warning names it.
"""

from __future__ import annotations

import pytest

from tests.dist.context_training import ContextRun, check_runs, train
from tests.dist.pool import Pool
from tests.reference.context_mixing import LATER, WHOLE
from tests.reference.context_parts import IN_PARTS
from tests.samples import part_of


@pytest.mark.sample
def test_blocks_in_parts_train_like_one_process(pool: Pool) -> None:
    runs = [ContextRun(name) for name in part_of(list(IN_PARTS), 4)]
    for run, record in zip(runs, check_runs(pool, runs), strict=True):
        assert len(record.blocks) >= 2
        for name, calls in record.blocks.items():
            assert calls.in_parts >= 6 and calls.problems == [], f"{run}: {name}: {calls}"


@pytest.mark.sample
def test_blocks_that_mix_tokens_compute_whole_sequences_and_are_named(pool: Pool) -> None:
    runs = [ContextRun(name) for name in part_of(list(WHOLE), 4)]
    for run, record in zip(runs, check_runs(pool, runs), strict=True):
        reason = WHOLE[run.name][1]
        assert len(record.blocks) == 2
        for name, calls in record.blocks.items():
            assert calls.in_parts == 0 and calls.whole >= 6, f"{run}: {name}: {calls}"
            assert calls.problems, f"{run}: {name}"
            assert all(reason in problem for problem in calls.problems), f"{run}: {calls}"
            assert any(f"'{name}'" in line and reason in line for line in record.warnings)


@pytest.mark.sample(keep=0)
def test_blocks_that_begin_to_mix_tokens_are_tried_again(pool: Pool) -> None:
    runs = [ContextRun(name) for name in LATER]
    for run, record in zip(runs, check_runs(pool, runs), strict=True):
        for name, calls in record.blocks.items():
            assert calls.in_parts >= 1 and calls.whole >= 1, f"{run}: {name}: {calls}"
            assert calls.problems


SHAPES = {
    "one sample": ContextRun("causal", num_samples=1, microbatches=1),
    "one token for each": ContextRun("packed", cp=4, lengths=(4, 5, 11)),
    "more ranks than keys": ContextRun("grouped heads", cp=4, lengths=(9, 4, 6)),
    "uneven heads": ContextRun("sliding", cp=3, lengths=(8, 7, 10)),
}


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_any_length_train_like_one_process(pool: Pool, shape: str) -> None:
    (record,) = check_runs(pool, [SHAPES[shape]])
    assert all(calls.in_parts >= 3 and not calls.problems for calls in record.blocks.values())


@pytest.mark.sample(keep=0)
def test_sequences_shorter_than_the_ranks_are_whole(pool: Pool) -> None:
    (record,) = check_runs(pool, [ContextRun("causal", cp=4, lengths=(3, 9, 2))])
    for calls in record.blocks.values():
        assert calls.in_parts == 2 and calls.whole >= 4 and not calls.problems


@pytest.mark.sample(keep=0)
def test_what_is_mixed_from_afar_is_seen_in_long_sequences(pool: Pool) -> None:
    (record,) = check_runs(pool, [ContextRun("dilation", lengths=(1030, 1100), steps=2)])
    assert all(calls.in_parts == 0 and calls.problems for calls in record.blocks.values())


@pytest.mark.sample(keep=0)
def test_a_list_with_tokens_that_a_block_changes_is_refused_by_name(pool: Pool) -> None:
    for (error,) in pool.run(2, train, [ContextRun("list")]):
        assert isinstance(error, str)
        assert "'blocks.0' (ListBlock) changes a list or a dictionary among its arguments" in error
