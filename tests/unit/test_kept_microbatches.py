"""The number of microbatches that a schedule keeps decides on the memory of a partition."""

from __future__ import annotations

import pytest

from smp import _C
from smp.config.schema import Config
from smp.partition.decide import kept_microbatches
from smp.pipeline import schedules


def most_units(actions: str) -> int:
    """Most units (microbatch and chunk) whose forward has begun and whose last part has not."""
    words = actions.split()
    kept = most = 0
    for word in words:
        if word[0] == "F":
            kept += 1
            most = max(most, kept)
        elif word[0] == "W" or "W" + word[1:] not in words:
            kept -= 1
    return most


@pytest.mark.parametrize("pipeline", schedules.POLICIES)
def test_the_rules_of_policies_count_as_their_plans_do(pipeline: str) -> None:
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
    lines = schedules.plan(pipeline, 4, 8, chunks).splitlines()
    counted = [-(-most_units(line.partition(":")[2]) // chunks) for line in lines]
    assert kept_microbatches(config, 4, chunks) == counted
