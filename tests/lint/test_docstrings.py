"""Sections of docstrings stand apart, as what reads them (the site, editors) asks for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lint.layers import REPO

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Warning|Yields):\s*")
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(text: str) -> Iterator[tuple[int, list[str]]]:
    """Number of the first line of each docstring, and its lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _OWNERS):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                yield node.body[0].lineno, docstring.splitlines()


def find_joined_sections(root: Path) -> list[str]:
    """Sections right below a line of another section or of the text."""
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        # Most files of tests have no section, and reading them all takes seconds.
        for begin, lines in docstrings(text) if _SECTION.search(text) else ():
            for i, line in enumerate(lines[1:], start=1):
                if _SECTION.fullmatch(line.strip()) and lines[i - 1].strip():
                    found.append(f"{path.relative_to(root).as_posix()}:{begin + i}: {line.strip()}")
    return found


@pytest.mark.parametrize("folder", ["python", "tests", "benchmarks", "examples", "website"])
def test_sections_of_docstrings_stand_apart(folder: str) -> None:
    assert find_joined_sections(REPO / folder) == []


def test_sections_are_found() -> None:
    sections = [
        line.strip()
        for path in (REPO / "python").rglob("*.py")
        for _, lines in docstrings(path.read_text())
        for line in lines
        if _SECTION.fullmatch(line.strip())
    ]
    assert min(sections.count(f"{name}:") for name in ("Args", "Returns", "Raises")) > 50


@pytest.mark.parametrize("owner", ["def f(x):", "class A:", "async def f(x):"])
def test_a_joined_section_is_found(tmp_path: Path, owner: str) -> None:
    lines = ['    """What it is.', "", "    Args:", "        x: a number.", "    Raises:"]
    lines += ["        ValueError: x is negative.", '    """']
    (tmp_path / "a.py").write_text("\n".join([owner, *lines]) + "\n")
    assert find_joined_sections(tmp_path) == ["a.py:6: Raises:"]
    lines.insert(4, "")
    (tmp_path / "a.py").write_text("\n".join([owner, *lines]) + "\n")
    assert find_joined_sections(tmp_path) == []
