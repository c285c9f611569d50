"""`smp plan` and `smp estimate` against layouts that were measured on a CPU."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from smp.config.schema import Config
from smp.planning.estimate import estimate
from smp.planning.layout import Layout
from smp.planning.run_cuts import Run, RunCuts
from smp.planning.search import Job, predict
from smp.planning.traced_model import TracedModel
from tests.conftest import REPO

RESULTS = REPO / "benchmarks" / "results" / "planning_xeon2_202611.jsonl"
TIMES = RESULTS.with_name("planning_xeon2_calibrated_202611.jsonl")
TAU = 0.8
LINES = [json.loads(line) for line in RESULTS.read_text().splitlines()]
MEASURED = [line for line in LINES if line["contender"] != "all"]
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """Scripts of that folder import each other by their names."""
    sys.path.insert(0, str(REPO / "benchmarks"))
    import planning

    yield planning
    sys.path.remove(str(REPO / "benchmarks"))


@pytest.fixture(scope="module")
def jobs(benchmark: ModuleType) -> Iterator[dict[int, Job]]:
    """The model is traced once for all layouts."""
    with benchmark.jobs_on(benchmark.hardware_of(TIMES)) as found:
        yield found


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("line", MEASURED, ids=lambda line: line["contender"])
def test_peaks_of_the_fullest_rank_are_the_measured_one_within_a_tenth(
    line: dict[str, Any], benchmark: ModuleType, jobs: dict[int, Job]
) -> None:
    (layout,) = (x for x in benchmark.LAYOUTS if x.text() == line["contender"])
    found = benchmark.prediction(layout, jobs[layout.num_ranks])
    assert max(found.rank_mb) == pytest.approx(max(line["peak_mb"]), rel=TOLERANCE)
    assert found.plan_mb == pytest.approx(max(line["peak_mb"]), rel=TOLERANCE)


@pytest.mark.sample(keep=0)
def test_order_of_quiet_times_is_met_as_far_as_the_page_says(
    benchmark: ModuleType, jobs: dict[int, Job]
) -> None:
    from planning_report import kendall_tau

    lines = benchmark.measured_before(TIMES, benchmark.LAYOUTS)
    times = [predict(jobs[x.num_ranks], x).time.total for x in benchmark.LAYOUTS]
    assert [x.text() for x in benchmark.LAYOUTS] == list(lines)
    for key in ("median_ms", "min_ms"):
        assert kendall_tau(times, [line[key] for line in lines.values()]) >= TAU


def test_layouts_of_all_kinds_were_measured_and_trained_alike(benchmark: ModuleType) -> None:
    assert {line["contender"] for line in MEASURED} == {x.text() for x in benchmark.LAYOUTS}
    assert len(MEASURED) >= 12 and {line["num_processes"] for line in MEASURED} == {2, 4, 8}
    first = MEASURED[0]["losses"]
    assert all(line["losses"] == pytest.approx(first, rel=1e-3) for line in MEASURED)
    assert {layout.samples for layout in benchmark.LAYOUTS} == {benchmark.SAMPLES}


@pytest.mark.sample(keep=0)
def test_stages_of_a_plan_are_those_of_the_run(benchmark: ModuleType) -> None:
    """Compares the stages, also inside of layers; together they are the chain."""
    device = benchmark.hardware_of(RESULTS)
    ids = benchmark.make_batch(benchmark.SHAPE, 1)
    traced = TracedModel(
        benchmark.meta_model(), (), {"input_ids": ids, "labels": ids}, device.flops_per_byte("fp32")
    )
    layout = Layout(pp=8, microbatches=8, active=8)
    stages = RunCuts(traced, "cpu").stages(layout, (10**10,) * 8)
    run = Run(Config.from_dict(layout.config()), frozenset(), 8)
    (_, kwargs), expected = traced.call, benchmark.meta_model()
    decision = estimate(expected, (), dict(kwargs), run).decision
    assert [stage.rank for stage in stages] == [*range(8), 0]  # and the head, which is tied
    by_rank = [0] * 8
    for stage in stages:
        by_rank[stage.rank] += sum(part.elements for part in stage.parts)
    assert [4 * elements for elements in by_rank] == list(decision.load_bytes)
    names = [part.name for stage in stages for part in stage.parts]
    assert any(name.endswith((".mlp", ".ln_2")) for name in names), "a layer is cut"
    chain = traced.profile()
    assert chain.tail is not None
    for key in ("forward", "backward", "kept"):
        total = sum(getattr(p, key).total for stage in stages for p in stage.parts)
        whole = sum(getattr(p, key).total for p in chain.chain)
        assert total == pytest.approx(whole) and whole > 0
    assert sum(p.num_products for s in stages for p in s.parts) == 2 * 8
    border = 128 * 512 * 4
    assert {stage.input_bytes / border for stage in stages[1:]} <= {1, 2, 3, 4, 5}


def test_tau_counts_pairs_that_are_ordered_alike(benchmark: ModuleType) -> None:
    from planning_report import kendall_tau

    order = list(range(6))
    assert kendall_tau(order, order) == 1 and kendall_tau(order, order[::-1]) == -1
    for seed in range(20):
        other = order.copy()
        random.Random(seed).shuffle(other)
        inversions = sum(a > b for a, b in itertools.combinations(other, 2))
        assert kendall_tau(order, other) == pytest.approx(1 - 2 * inversions / 15)
    with pytest.raises(ValueError, match="equal length"):
        kendall_tau([1.0], [1.0])


def test_layers_of_the_split_form_have_their_parameters(benchmark: ModuleType) -> None:
    """Profiles layers whose code reads the weights of products without calling the products."""
    ids = benchmark.make_batch(benchmark.SHAPE, 1)
    call = {"input_ids": ids, "labels": ids}
    plain = TracedModel(benchmark.meta_model(), (), call, 10.0).profile()
    with benchmark.split_form(benchmark.meta_model()) as form:
        split = TracedModel(form, (), call, 10.0).profile()
    assert split.elements == plain.elements
    for found, expected in zip(split.parts, plain.parts, strict=True):
        assert found.elements == expected.elements and found.is_layer == expected.is_layer
    assert split.tail is not None and plain.tail is not None
    assert split.tail.tied_elements == plain.tail.tied_elements > 0
    kept = [sum(p.kept.total for p in x.parts) for x in (plain, split)]
    assert kept[1] < 0.7 * kept[0], "fused operators keep less"
