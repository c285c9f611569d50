"""Schedules: plans, simulator and text form as Python sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp import _C
from smp.pipeline.schedules import (
    POLICIES,
    Boundary,
    Stage,
    plan,
    simulate,
)


def equal_stages(num_ranks: int, num_chunks: int = 1) -> list[Stage]:
    return [Stage(i % num_ranks, 1.0, 1.0, 1.0, 10) for i in range(num_ranks * num_chunks)]


def test_plans_are_text_with_one_line_per_rank() -> None:
    assert plan("simple", 1, 2) == "0: F0 F1 B0 B1\n"
    assert plan("interleaved", 2, 3) == "0: F0 F1 B0 F2 B1 B2\n1: F0 B0 F1 B1 F2 B2\n"
    assert plan("virtual_interleaved", 2, 2, 2).splitlines()[1] == (
        "1: F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"
    )
    assert plan("zero_bubble", 2, 2) == "0: F0 F1 B0 W0 B1 W1\n1: F0 B0 F1 B1 W0 W1\n"


def test_policies_execute_their_plans_and_have_the_known_bubbles() -> None:
    p, m = 4, 8
    # Per unit of F = B = W: (p-1)(F+B+W), the same over two chunks of half a stage, (p-1)(F+B-W).
    bubbles = {"simple": 9.0, "interleaved": 9.0, "virtual_interleaved": 9.0, "zero_bubble": 3.0}
    active = {"simple": m, "interleaved": p, "virtual_interleaved": m, "zero_bubble": p}
    assert set(bubbles) == set(POLICIES)
    for name in POLICIES:
        chunks = _C.make_policy(name).default_chunks
        result = simulate(equal_stages(p, chunks), m, name, active_microbatches=active[name])
        assert result.executed == plan(name, p, m, chunks), name
        assert [r.bubble_ms for r in result.ranks] == pytest.approx([bubbles[name]] * p), name
        again = simulate(equal_stages(p, chunks), m, result.executed)
        assert again.makespan_ms == result.makespan_ms, name


def test_result_has_peaks_and_a_timeline_with_transfers_in_between() -> None:
    result = simulate(
        [Stage(0, 1.0, 2.0, activation_bytes=100), Stage(1, 1.0, 2.0, activation_bytes=7)],
        2,
        boundaries=[Boundary(0.25, 0.001, forward_bytes=250, backward_bytes=750)],
        active_microbatches=2,
    )
    assert [r.peak_activations for r in result.ranks] == [2, 1]
    assert [r.peak_activation_bytes for r in result.ranks] == [200, 7]
    first = result.timeline[0]
    assert (first.rank, first.stage, first.action, first.start_ms) == (0, 0, "F0", 0.0)
    starts = {(e.rank, e.action): e.start_ms for e in result.timeline}
    ends = {(e.rank, e.action): e.end_ms for e in result.timeline}
    assert starts[1, "F0"] == pytest.approx(ends[0, "F0"] + 0.5)
    assert starts[0, "B0"] == pytest.approx(ends[1, "B0"] + 1.0)
    assert result.makespan_ms == max(ends.values())


def test_texts_and_numbers_that_make_no_sense_are_refused_with_their_place() -> None:
    with pytest.raises(ValueError, match="line 2, column 7: expected F"):
        simulate(equal_stages(2), 1, "0: F0 B0\n1: F0 C0\n")
    with pytest.raises(ValueError, match="'1f1b' is unknown; use 'interleaved'"):
        simulate(equal_stages(2), 1, "1f1b")
    with pytest.raises(ValueError, match="active_microbatches must be 1 or more.*got 0"):
        simulate(equal_stages(2), 1, active_microbatches=0)
    with pytest.raises(ValueError, match="the list of rank 1 lacks B0"):
        simulate(equal_stages(2), 1, "0: F0 B0\n1: F0\n")
    with pytest.raises(ValueError, match="multiple of the ranks"):
        plan("virtual_interleaved", 4, 6, 2)


times = st.floats(0.0, 20.0)


@given(
    st.lists(st.tuples(times, times, times), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from(POLICIES),
)
def test_what_was_executed_can_be_given_as_data(
    costs: list[tuple[float, float, float]], num_microbatches: int, active: int, name: str
) -> None:
    stages = [Stage(rank, *cost) for rank, cost in enumerate(costs)]
    first = simulate(stages, num_microbatches, name, active_microbatches=active)
    again = simulate(stages, num_microbatches, first.executed, active_microbatches=active)
    assert again.executed == first.executed
    assert again.makespan_ms <= first.makespan_ms + 1e-6
    for rank, usage in enumerate(first.ranks):
        assert usage.busy_ms == pytest.approx(num_microbatches * sum(costs[rank]), abs=1e-3)
        assert usage.busy_ms + usage.bubble_ms == pytest.approx(first.makespan_ms)
