"""Which settings would have made a rank fit: the arithmetic, setting by setting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smp.observe.memory.advice import Need, Situation, best_setting, settings_that_fit

NEED = Need(parameters=10, gradients=10, optimizer=20, activations=60)


def words(situation: Situation) -> list[str]:
    found = settings_that_fit(situation)
    assert all(one.needs_bytes <= situation.room_bytes for one in found)
    return [one.words for one in found]


def test_more_microbatches_as_many_as_are_needed() -> None:
    one_process = Situation(NEED, room_bytes=60, microbatches=2, samples=8, is_fp32=False)
    found = settings_that_fit(one_process)
    # 40 + 60 / 2 = 70 is too much, 40 + 60 / 4 = 55 is not.
    assert [(one.words, one.needs_bytes) for one in found] == [('"microbatches": 8', 55.0)]
    assert words(replace(one_process, samples=2)) == [], "a microbatch has two samples"


def test_replicas_can_share_state_or_all() -> None:
    replicas = Situation(
        replace(NEED, activations=10), room_bytes=41, rdp=2, largest_unit_bytes=3, is_fp32=False
    )
    found = {one.words: one.needs_bytes for one in settings_that_fit(replicas)}
    assert found == {
        '"shard_optimizer_state": True': 10 + 10 + 10 + 10,
        '"sharded_data_parallel_degree": 2': 5 + 5 + 10 + 10 + 6,
    }
    assert words(replace(replicas, shard_size=2, shards_parameters=True)) == []


def test_pipelines_can_keep_fewer_microbatches_or_have_more_stages() -> None:
    pipeline = Situation(NEED, 75, pp=2, in_flight=3, most_in_flight=3, num_blocks=3, is_fp32=False)
    found = {one.words: one.needs_bytes for one in settings_that_fit(pipeline)}
    assert found == {'"active_microbatches": 1': 60.0}, "two of three would need 80"
    deep = replace(pipeline, room_bytes=80, num_blocks=4)
    assert words(deep) == ['"active_microbatches": 2', '"pipeline_parallel_degree": 4']


def test_smaller_microbatches_are_more_in_flight_until_the_schedule_has_enough() -> None:
    begins = Situation(NEED, 75, pp=2, in_flight=1, most_in_flight=2, samples=8, is_fp32=False)
    # Two in flight of half the size are as much as one; four pieces, of which two are kept, half.
    assert settings_that_fit(begins)[0].words == '"microbatches": 4'
    assert settings_that_fit(begins)[0].needs_bytes == 40 + 60 * 2 / 4


def test_checkpointing_counts_where_the_trace_knows_what_it_leaves() -> None:
    known = Situation(NEED, room_bytes=50, checkpointed_bytes=9, is_fp32=False)
    assert [one.needs_bytes for one in settings_that_fit(known)] == [49.0]
    assert words(replace(known, checkpointed_bytes=None)) == []


def test_16_bits_halve_activations_and_add_masters() -> None:
    state_is_small = Situation(NEED, room_bytes=80, is_fp32=True)
    # 5 parameters, 10 gradients, 20 + 10 of state and masters, 30 activations.
    assert [(s.words, s.needs_bytes) for s in settings_that_fit(state_is_small)] == [
        ('"bf16": True', 75.0)
    ]
    no_activations = replace(state_is_small, need=replace(NEED, activations=2), room_bytes=41)
    assert words(no_activations) == [], "16 bits alone would need more than before"


def test_pairs_come_where_one_setting_is_not_enough() -> None:
    both = Situation(NEED, 46, rdp=2, samples=4, largest_unit_bytes=4, is_fp32=False)
    found = words(both)
    assert found and all(" and " in one for one in found)
    assert not any("shard_optimizer" in one and "sharded_data" in one for one in found)


def test_at_most_three_and_the_best_where_nothing_is_enough() -> None:
    many = Situation(
        NEED, 99, pp=2, rdp=2, in_flight=3, most_in_flight=3, samples=8, checkpointed_bytes=1,
        num_blocks=8, largest_unit_bytes=1,
    )  # fmt: skip
    assert len(settings_that_fit(many)) == 3
    hopeless = replace(many, room_bytes=1)
    assert settings_that_fit(hopeless) == []
    best = best_setting(hopeless)
    assert best is not None and best.words.startswith("smp.set_activation_checkpointing")
    assert best_setting(Situation(Need(10, 0, 0, 0), 5, is_fp32=False)) is None


@pytest.mark.parametrize("factor", [2, 4])
def test_need_is_the_sum_of_its_parts(factor: int) -> None:
    assert replace(NEED, fixed=factor).total == 100 + factor
