"""ARCHITECTURE.md names the owner of each attribute, table and variable outside of objects."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lint import layers

PACKAGE = layers.REPO / "python" / "smp"
_ATTRIBUTE = re.compile(r"\b_smp_[a-z_]+\b")
_PYTHON_VARIABLE = re.compile(r"= (?:contextvars\.)?ContextVar\(|\bthreading\.local\b")
_CPP_VARIABLE = re.compile(r"^thread_local .*?(\w+)(?: =.*)?;", re.MULTILINE)
_TABLE = re.compile(
    r"^(_?[A-Za-z][A-Za-z_]*)(?:: [^=\n]+)? = "
    r"(?:(?:weakref\.)?Weak\w+\(|set\(\)|\{\}|\[\]|CreationMarks\()",
    re.MULTILINE,
)


def section(heading: str) -> list[list[str]]:
    """Returns the rows of the table below a heading, each cell with its words in code marks."""
    text = (layers.REPO / "ARCHITECTURE.md").read_text()
    body = text.split(f"\n### {heading}\n")[1].split("\n#")[0]
    rows = [line.split(" | ") for line in body.splitlines() if line.startswith("| `")]
    return rows


def named(heading: str, column: int) -> set[str]:
    """Returns the words in code marks of one column."""
    return {name for row in section(heading) for name in re.findall(r"`([^`]+)`", row[column])}


def sources() -> Iterator[tuple[str, str]]:
    """Yields the path below the package, and the text, of each Python file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def test_attributes_have_an_owner() -> None:
    found = {name for _, text in sources() for name in _ATTRIBUTE.findall(text)}
    assert len(found) > 10
    assert found == named("Attributes", 1)


def test_owners_use_their_attributes() -> None:
    for owner, names, *_ in section("Attributes"):
        (path,) = re.findall(r"`([^`]+)`", owner)
        used = set(_ATTRIBUTE.findall((PACKAGE / path).read_text()))
        listed = set(re.findall(r"`([^`]+)`", names))
        assert listed & used, f"{path} uses none of {listed}"


def test_tables_of_modules_have_an_owner() -> None:
    owners = named("Tables of a module", 0)
    found = {place: _TABLE.findall(text) for place, text in sources()}
    found = {place: names for place, names in found.items() if names}
    assert found.keys() - owners == set(), "tables of a module without a line in ARCHITECTURE.md"
    listed = named("Tables of a module", 1)
    assert {name for names in found.values() for name in names} - listed == set()
    assert [owner for owner in owners if not (PACKAGE / owner).is_file()] == []


def test_context_variables_and_thread_locals_have_an_owner() -> None:
    python = {place for place, text in sources() if _PYTHON_VARIABLE.search(text)}
    python.discard("pipeline/collectors.py")  # has variables of others, as a table
    cpp = {
        f"csrc/{path.relative_to(layers.REPO / 'csrc').as_posix()}": names
        for path in layers.cpp_files(layers.REPO / "csrc")
        if (names := _CPP_VARIABLE.findall(path.read_text()))
    }
    heading = "Context variables and thread-locals"
    assert named(heading, 0) == python | cpp.keys()
    assert {name for names in cpp.values() for name in names} <= named(heading, 1)


def test_rooms_of_csrc_are_drawn() -> None:
    text = (layers.REPO / "ARCHITECTURE.md").read_text()
    table = text.split("\n## Rooms of `csrc`\n")[1].split("\n## ")[0]
    drawn = {(int(n), room) for n, room in re.findall(r"^\| (\d+) \| `(\w+)` \|", table, re.M)}
    assert drawn == {(n, room) for n, rooms in enumerate(layers.CPP_LAYERS) for room in rooms}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("_known: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()", "_known"),
        ("_said: set[str] = set()", "_said"),
        ("_classes: dict[type, type] = {}", "_classes"),
    ],
)
def test_tables_are_found(line: str, name: str) -> None:
    assert _TABLE.findall(f"import x\n{line}\n") == [name]
