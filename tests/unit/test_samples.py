"""`make test` runs a few cases of each claim, `make test-all` the others, and both say how far."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests import marked, samples
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


def test_each_test_is_in_one_share() -> None:
    names = [f"tests/unit/test_some.py::test_one[{i}]" for i in range(300)]
    for num_shares in (1, 3):
        shares = [(k, num_shares) for k in range(1, num_shares + 1)]
        numbers = [sum(samples.is_in(share, name) for name in names) for share in shares]
        assert sum(numbers) == len(names) and min(numbers) > len(names) / num_shares / 2
        assert all(sum(samples.is_in(share, name) for share in shares) == 1 for name in names)


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "3", "a/b"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SMP_SHARE is .*expected k/n"):
        samples._share(text)


def test_some_of_a_file_of_several_processes_are_its_first_and_those_with_a_number() -> None:
    def item(nodeid: str, *, marked: bool = False) -> Any:
        item = Mock(get_closest_marker=lambda name: marked or None)
        item.nodeid = nodeid
        return item

    few = [item(f"tests/dist/test_few.py::test_{i}") for i in range(samples.NUM_OF_A_FILE)]
    many = [item(f"tests/dist/test_many.py::test_{i}") for i in range(6)]
    named = item("tests/dist/test_many.py::test_with_a_number", marked=True)
    alone = [item(f"tests/unit/test_one_process.py::test_{i}") for i in range(6)]
    left_out = samples._beyond_files([*few, *many, named, *alone])
    assert left_out == set(many[samples.NUM_OF_A_FILE :])


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("case", range(5))
def test_a_claim_with_many_cases(case: int) -> None:
    assert case in range(5)


@pytest.mark.parametrize("case", range(5))
def test_a_claim_without_a_marker(case: int) -> None:
    assert case in range(5)


def test_what_completes_rows_shows_the_values_that_they_do_not() -> None:
    rows = list(itertools.product("abcd", range(3), range(2)))
    some = samples.spread(rows, 2)
    others = samples.completing([row for row in rows if row not in some], some)
    assert len(others) == 2  # of 22: two letters are missing, and one number
    assert [{row[i] for row in some + others} for i in range(3)] == [set("abcd"), {0, 1, 2}, {0, 1}]
    assert samples.completing(others, some + others) == []


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", range(4))
def test_a_claim_about_a_product(first: int, second: int) -> None:
    assert (first, second) in itertools.product(range(4), range(4))


#: Such a test counts cases of this session; `make test` always has all of its own.
needs_all_shares = pytest.mark.skipif(samples.SHARE != (1, 1), reason="SMP_SHARE=1/1 runs it")


@needs_all_shares
@pytest.mark.sample
def test_marked_products_show_each_value(request: pytest.FixtureRequest) -> None:
    ran = [i for i in request.session.items if i.name.startswith("test_a_claim_about_a_product[")]
    whole = samples.RUNS_GRID or "::" in "".join(request.config.args)
    assert len(ran) == (16 if whole else {"some": 1, "others": 3, "all": 4}[samples.SAMPLES])


@needs_all_shares
@pytest.mark.sample
@pytest.mark.parametrize(("test", "kept"), [("with_many_cases", 2), ("without_a_marker", 1)])
def test_cases_are_sampled(request: pytest.FixtureRequest, test: str, kept: int) -> None:
    ran = [i for i in request.session.items if i.name.startswith(f"test_a_claim_{test}[")]
    named = "::" in "".join(request.config.args)
    assert len(ran) == (
        5 if named else {"some": kept, "others": 5 - kept, "all": 5}[samples.SAMPLES]
    )


@pytest.mark.sample(keep=0)
def test_a_claim_that_takes_long() -> None:
    assert samples.SAMPLES in ("others", "all")


def test_a_test_without_parameters_is_in_one_of_both(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marker = item.get_closest_marker("sample")
        if marker and not hasattr(item, "callspec"):
            assert marker.kwargs.get("keep", 0) == 0, item.nodeid


@needs_all_shares
@pytest.mark.sample
def test_what_takes_long_is_left_to_the_others(request: pytest.FixtureRequest) -> None:
    names = {item.name for item in request.session.items}
    assert ("test_a_claim_that_takes_long" in names) == (samples.SAMPLES != "some")


def lacks(path: Path, expression: str, *named: str) -> bool:
    config: Any = SimpleNamespace(args=named, option=SimpleNamespace(markexpr=expression))
    return marked.lacks_marks(path, config)


def test_files_without_the_marker_of_a_session_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "SAMPLES", "some")
    waits, other = tmp_path / "test_waits.py", tmp_path / "test_other.py"
    waits.write_text("pytestmark = pytest.mark.waits")
    other.write_text("@pytest.mark.sample(keep=1)")
    folder = str(tmp_path)
    assert not lacks(waits, "waits", folder) and lacks(other, "waits", folder)
    assert lacks(waits, "alone", folder)
    for expression in ("", "not alone", "not alone and not waits"):
        assert not lacks(other, expression, folder)
    # Files that the command names are for pytest to look into, and helpers have no tests.
    assert not lacks(other, "waits", str(other)) and not lacks(other, "waits", f"{other}::test_it")
    assert not lacks(tmp_path / "pool.py", "waits", folder)
    monkeypatch.setattr(samples, "SAMPLES", "others")
    assert lacks(waits, "", folder) and not lacks(other, "", folder)
    assert lacks(other, "waits", folder)


def test_a_marker_from_another_file_is_refused(request: pytest.FixtureRequest) -> None:
    item: Any = SimpleNamespace(
        nodeid="test_x", path=Path(marked.__file__), get_closest_marker=lambda name: name == "alone"
    )
    with pytest.raises(pytest.UsageError, match="test_x has the marker 'alone', which its file"):
        marked.check_named([item])
    marked.check_named(request.session.items)


def test_progress_tells_what_remains() -> None:
    assert progress_line(312, 1503, 250.0) == "312 of 1503 tests, 4:10, about 15:54 left"
    assert progress_line(0, 10, 1.0) == "0 of 10 tests, 0:01, about 0:00 left"
