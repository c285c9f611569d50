"""`make test` runs a few cases of each claim, `make test-all` the others, and both say how far."""

from __future__ import annotations

import itertools

import pytest

from tests import samples
from tests.progress import progress_line


def test_few_rows_show_as_many_values_as_they_can() -> None:
    rows = list(itertools.product("abc", range(3)))
    some = samples.spread(rows, 3)
    assert {row[0] for row in some} == set("abc") and {row[1] for row in some} == {0, 1, 2}
    assert samples.spread(rows, 3) == some
    assert set(samples.spread(rows, 5)) > set(some)
    assert sorted(samples.spread(rows, 100)) == rows


def test_the_others_are_what_some_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {}
    for mode in ("some", "others", "all"):
        monkeypatch.setattr(samples, "SAMPLES", mode)
        parts[mode] = samples.part_of(range(7), 3)
    assert parts == {"some": [0, 1, 2], "others": [3, 4, 5, 6], "all": list(range(7))}


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("case", range(5))
def test_a_claim_with_many_cases(case: int) -> None:
    assert case in range(5)


@pytest.mark.sample
def test_marked_cases_are_sampled(request: pytest.FixtureRequest) -> None:
    ran = [i for i in request.session.items if i.name.startswith("test_a_claim_with_many_cases[")]
    named = "::" in "".join(request.config.args)
    assert len(ran) == (5 if named else {"some": 2, "others": 3, "all": 5}[samples.SAMPLES])


def test_every_sample_keeps_a_case_and_leaves_one_out(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marker = item.get_closest_marker("sample")
        assert marker is None or marker.kwargs.get("keep", 1) >= 1, item.nodeid


def test_progress_tells_what_remains() -> None:
    assert progress_line(312, 1503, 250.0) == "312 of 1503 tests, 4:10, about 15:54 left"
    assert progress_line(0, 10, 1.0) == "0 of 10 tests, 0:01, about 0:00 left"
