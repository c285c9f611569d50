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

from tests.conftest import REPO

RESULTS = REPO / "benchmarks" / "results" / "planning_xeon2_202611.jsonl"
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


@pytest.mark.sample(keep=7)
@pytest.mark.parametrize("line", MEASURED, ids=lambda line: line["contender"])
def test_peak_of_the_fullest_rank_is_the_measured_one_within_a_tenth(
    line: dict[str, Any], benchmark: ModuleType
) -> None:
    layout = next(x for x in benchmark.LAYOUTS if x.text() == line["contender"])
    device = benchmark.hardware_of(RESULTS)
    (found,) = benchmark.predictions([layout], device).values()
    assert max(found.rank_mb) == pytest.approx(max(line["peak_mb"]), rel=TOLERANCE)


def test_layouts_of_all_kinds_were_measured_and_trained_alike(benchmark: ModuleType) -> None:
    assert {line["contender"] for line in MEASURED} == {x.text() for x in benchmark.LAYOUTS}
    assert len(MEASURED) >= 12 and {line["num_processes"] for line in MEASURED} == {2, 4, 8}
    first = MEASURED[0]["losses"]
    assert all(line["losses"] == pytest.approx(first, rel=1e-3) for line in MEASURED)
    assert {layout.samples for layout in benchmark.LAYOUTS} == {benchmark.SAMPLES}


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
    """Their products are read by the code of the layer, and never called."""
    ids = benchmark.make_batch(benchmark.SHAPE, 1)
    call = {"input_ids": ids, "labels": ids}
    plain = benchmark.profile(benchmark.meta_model(), (), call, 10.0)
    with benchmark.split_form(benchmark.meta_model()) as form:
        split = benchmark.profile(form, (), call, 10.0)
    assert split.elements == plain.elements
    for found, expected in zip(split.parts, plain.parts, strict=True):
        assert found.elements == expected.elements and found.is_layer == expected.is_layer
    assert split.tail is not None and plain.tail is not None
    assert split.tail.tied_elements == plain.tail.tied_elements > 0
    kept = [sum(p.split_kept + p.whole_kept for p in x.parts) for x in (plain, split)]
    assert kept[1] < 0.7 * kept[0], "fused operators keep less"
