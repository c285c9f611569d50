"""What a schedule keeps, from which the partition knows its memory."""

from __future__ import annotations

from smp import _C
from smp.config.schema import Config
from smp.partition.decide import kept_microbatches
from smp.pipeline import schedules as schedule
from smp.pipeline.chosen_schedule import ChosenSchedule


def of(text: str, num_chunks: int = 1) -> ChosenSchedule:
    lists = tuple(line.partition(":")[2].strip() for line in text.splitlines())
    return ChosenSchedule("interleaved", num_chunks, lists)


def test_a_policy_leaves_the_count_to_its_rule() -> None:
    assert ChosenSchedule("simple").kept_microbatches is None


def test_lists_are_counted() -> None:
    assert of(schedule.plan("simple", 3, 6)).kept_microbatches == [6, 6, 6]
    assert of(schedule.plan("interleaved", 4, 8)).kept_microbatches == [4, 3, 2, 1]
    assert of(schedule.plan("zero_bubble", 4, 8)).kept_microbatches == [4, 4, 4, 4]
    # 11 units of half a microbatch on the first rank, 5 on the last.
    virtual = of(schedule.plan("virtual_interleaved", 4, 8, 2), num_chunks=2)
    assert virtual.kept_microbatches == [6, 5, 4, 3]


def test_the_rules_of_policies_count_as_their_plans_do() -> None:
    for pipeline in schedule.POLICIES:
        chunks = _C.make_policy(pipeline).default_chunks
        active = {"simple": 8, "virtual_interleaved": 8}.get(pipeline, 4)
        config = Config.from_dict(
            {
                "partitions": 4,
                "microbatches": 8,
                "pipeline": pipeline,
                "active_microbatches": active,
            }
        )
        plan = of(schedule.plan(pipeline, 4, 8, chunks), chunks)
        assert kept_microbatches(config, 4, chunks) == plan.kept_microbatches, pipeline
