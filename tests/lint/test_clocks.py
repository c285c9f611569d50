"""Checks that no test asserts that something was quick.

A test asserts the reason that a wait itself reports for its end (`tests/patience.py`). Lower
bounds are allowed, because they hold on the busiest machine. So are tests with the marker `alone`,
which run beside no others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lint.layers import REPO
from tests.patience import PATIENCE_S

_CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time")
_KEEPING = ("max", "min", "sum", "round", "float", "abs")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _is_time(value: ast.AST | None, names: set[str]) -> bool:
    """Returns whether an expression is computed from a clock.

    Args:
        value: the expression.
        names: variables with times, and functions that return times.
    """
    match value:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(attr=attr):  # of `Ended` and `Outcome`
            return attr == "time"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=attr)):
            return attr.removesuffix("_ns") in _CLOCKS
        case ast.Call(func=ast.Name(id=name), args=args):
            return name in names or (name in _KEEPING and any(_is_time(a, names) for a in args))
        case ast.BinOp(left=left, right=right):
            return _is_time(left, names) or _is_time(right, names)
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return _is_time(element, names)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return any(_is_time(element, names) for element in elements)
        case _:
            return False


def _names_of_times(module: ast.Module) -> set[str]:
    """Variables and functions of a file that are of a clock; one name is one variable."""
    names: set[str] = set()
    num_before = -1
    while num_before != len(names):
        num_before = len(names)
        for node in ast.walk(module):
            match node:
                case ast.Assign(targets=targets, value=value) if _is_time(value, names):
                    names.update(t.id for t in targets if isinstance(t, ast.Name))
                case (
                    ast.AnnAssign(target=ast.Name(id=name), value=value)
                    | ast.AugAssign(target=ast.Name(id=name), value=value)
                    | ast.NamedExpr(target=ast.Name(id=name), value=value)
                ) if _is_time(value, names):
                    names.add(name)
                case ast.FunctionDef(name=name):
                    returned = [r.value for r in ast.walk(node) if isinstance(r, ast.Return)]
                    names.update({name} if any(_is_time(r, names) for r in returned) else ())
                case _:
                    pass
    return names


def _bounds_a_time(condition: ast.AST, names: set[str]) -> bool:
    """Returns whether a condition is an upper bound of a time."""
    for node in ast.walk(condition):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if isinstance(operator, ast.Lt | ast.LtE | ast.Eq) and _is_time(left, names):
                return True
            if isinstance(operator, ast.Gt | ast.GtE | ast.Eq) and _is_time(right, names):
                return True
    return False


def _is_alone(node: ast.AST) -> bool:
    """Returns whether a file or a test has the marker `alone`."""
    match node:
        case ast.Module(body=body):
            marks: list[ast.AST] = [
                statement.value
                for statement in body
                if isinstance(statement, ast.Assign)
                and ast.unparse(statement.targets[0]) == "pytestmark"
            ]
        case ast.FunctionDef(decorator_list=decorators):
            marks = list(decorators)
        case _:
            return False
    return any(getattr(part, "attr", "") == "alone" for mark in marks for part in ast.walk(mark))


def _asserts(node: ast.AST) -> Iterator[ast.Assert]:
    """Asserts of all tests that run beside others."""
    if _is_alone(node):
        return
    if isinstance(node, ast.Assert):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _asserts(child)


def find_bounds(text: str) -> list[int]:
    """Lines that assert that something took at most so long."""
    if not re.search(r"\btime\b", text):  # neither the module nor an attribute of this name
        return []
    module = ast.parse(text)
    names = _names_of_times(module)
    return [one.lineno for one in _asserts(module) if _bounds_a_time(one.test, names)]


def find_limits(text: str) -> list[int]:
    """Lines with a `timeout` that is shorter than `PATIENCE_S`."""
    if "timeout" not in text:
        return []
    return [
        value.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg in ("timeout", "timeout_s")
        and isinstance(value := node.value, ast.Constant)
        and isinstance(value.value, int | float)
        and value.value < PATIENCE_S
    ]  # fmt: skip


def _files() -> Iterator[Path]:
    return (path for path in sorted((REPO / "tests").rglob("*.py")) if path != Path(__file__))


def test_no_test_asserts_that_something_was_quick() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line}"
        for path in _files()
        for line in find_bounds(path.read_text())
    ]
    assert found == []


def test_no_wait_is_given_up_before_the_patience_of_all() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line}"
        for path in _files()
        for line in find_limits(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "assert time.monotonic() - begin < 5",
        "assert 5 >= time.perf_counter_ns() - begin",
        "began_s = time.time()\nassert fine and 0.2 < now - began_s < 3",
        "took = time.monotonic() - begin\nworst = max(worst, took)\nassert worst <= LIMIT, worst",
        "def wait():\n    return time.monotonic() - begin\nseconds = wait()\nassert seconds < 3",
        "assert result.time - begin < 3",
        "assert max(r.time for r in results) - begin < 3",
    ],
)
def test_a_bound_is_found(text: str) -> None:
    assert find_bounds(text) == [len(text.splitlines())]
    inner = "\n".join(f"    {line}" for line in text.splitlines())
    assert find_bounds(f"def test_it():\n{inner}") != []
    assert find_bounds(f"@pytest.mark.alone\ndef test_it():\n{inner}") == []
    assert find_bounds(f"pytestmark = [pytest.mark.alone]\n{text}") == []


@pytest.mark.parametrize(
    "text",
    [
        "assert time.monotonic() - begin >= 0.2",
        "assert 0.2 < time.monotonic() - begin",
        "begin = time.monotonic()\nassert count < 3",
        "assert timing.seconds < 3",
    ],
)
def test_other_asserts_are_not(text: str) -> None:
    assert find_bounds(text) == []


def test_a_short_limit_is_found() -> None:
    assert find_limits(
        "pool.run(2, train, timeout=30)\nprocess.communicate(timeout=PATIENCE_S)"
    ) == [1]
