"""A room may not have more lines of code than its limit in `budget.json`."""

from __future__ import annotations

import json

import pytest

from tests.lint import budget, layers
from tests.lint.budget import Lines


def test_rooms_have_no_more_lines_than_the_table_permits() -> None:
    rooms = budget.count(budget.files_of_tree(layers.REPO))
    assert {f"csrc/{room}" for layer in layers.CPP_LAYERS for room in layer} <= rooms.keys()
    assert {f"python/smp/{r}" for layer in layers.PYTHON_LAYERS for r in layer} <= rooms.keys()
    found = budget.complaints(rooms, json.loads(budget.TABLE.read_text()))
    assert found == [], "write less, or `python -m tests.lint.budget --write --reason '...'`"


def test_the_table_is_written_by_the_program() -> None:
    text = budget.TABLE.read_text()
    assert budget.as_json(json.loads(text)) == text


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""One.\n\nTwo.\n"""\n\nx = 1  # why\n# alone\n', Lines(1, 4)),
        ('def f():\n    """Does."""\n    return """a\n\n    b"""\n', Lines(3, 1)),
        ("x = [\n    1,\n\n    2,\n]\n", Lines(4, 0)),
        ("class A:\n    x: int\n    'Of x.'\n", Lines(2, 1)),
        ("", Lines(0, 0)),
    ],
)
def test_lines_of_python_are_counted(source: str, lines: Lines) -> None:
    assert budget.count_python(source) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("// a\nint x;  // b\n\n/// c\n", Lines(1, 2)),
        ("/* a\n\n   b */ int x;\n/* c */\n", Lines(1, 2)),
        ('auto a = "// no";\nchar b = \'"\';\n// yes\n', Lines(2, 1)),
        ('auto a = R"(\n// no\n)";\n// yes\n', Lines(3, 1)),
        ("int big = 1'000'000;  // it's\n// yes\n", Lines(1, 1)),
    ],
)
def test_lines_of_cpp_are_counted(source: str, lines: Lines) -> None:
    assert budget.count_cpp(source) == lines


def test_files_belong_to_rooms() -> None:
    assert budget.room_of("csrc/kernels/cuda/a.cu") == "csrc/kernels"
    assert budget.room_of("python/smp/nn/huggingface/a.py") == "python/smp/nn"
    assert budget.room_of("python/smp/amp.py") == "python/smp"
    assert budget.room_of("python/smp_cli/doctor/a.py") == "python/smp_cli"
    assert budget.room_of("python/smp/py.typed") is None
    assert budget.room_of("python/smp/_build_info.py") is None
    assert budget.room_of("python/smp/_C.pyi") is None


def test_rooms_that_break_the_table_are_found() -> None:
    table: budget.Table = {"a": {"code": 5, "text": 1}, "gone": {"code": 5, "text": 1}}
    rooms = {"a": Lines(6, 1), "new": Lines(1, 0)}
    found = budget.complaints(rooms, table)
    assert [line.split(":")[0] for line in found] == ["a", "new", "gone"]
    assert budget.complaints({"a": Lines(5, 9), "gone": Lines(4, 0)}, table) == []


def test_limits_fall_alone_and_grow_with_a_reason_only() -> None:
    table: budget.Table = {"a": {"code": 5, "text": 1, "reason": "x"}, "b": {"code": 5, "text": 1}}
    lower = {"a": Lines(4, 2), "b": Lines(5, 1)}
    assert budget.updated(lower, table, None) == {
        "a": {"code": 4, "text": 2, "reason": "x"},
        "b": {"code": 5, "text": 1},
    }
    higher = {"b": Lines(6, 1), "c": Lines(1, 0)}
    with pytest.raises(ValueError, match="grow only with --reason: b, c"):
        budget.updated(higher, table, None)
    assert budget.updated(higher, table, "new kind") == {
        "b": {"code": 6, "text": 1, "reason": "new kind"},
        "c": {"code": 1, "text": 0, "reason": "new kind"},
    }


def test_the_report_shows_rooms_that_changed() -> None:
    before, now = {"a": Lines(5, 1), "b": Lines(2, 2)}, {"a": Lines(3, 1), "b": Lines(2, 2)}
    rows = [line.split() for line in budget.report(before, now, {"a": {"code": 4, "text": 1}})]
    assert rows[1:] == [
        ["a", "3", "-2", "4", "1", "+0"],
        ["all", "rooms", "5", "-2", "4", "3", "+0"],
    ]
