"""Docstrings and comments are plain English; see `tests/lint/english.py`."""

from __future__ import annotations

import pytest

from tests.lint.english import problems_below, problems_of, problems_of_page
from tests.lint.layers import REPO

PACKAGES = REPO / "python"
ROOMS = sorted(p.name for p in (PACKAGES / "smp").iterdir() if p.is_dir() and p.name[0] != "_")
FOLDERS = {room: PACKAGES / "smp" / room for room in ROOMS} | {"smp_cli": PACKAGES / "smp_cli"}


@pytest.mark.parametrize("room", FOLDERS)
def test_docstrings_and_comments_are_plain(room: str) -> None:
    problems = problems_below(FOLDERS[room])
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("room", sorted(p.name for p in (REPO / "csrc").iterdir()))
def test_comments_of_cpp_are_plain(room: str) -> None:
    problems = problems_below(REPO / "csrc" / room)
    assert not problems, "\n".join(problems)


#: models.md is written by `python -m tests.zoo`
PAGES = sorted({p.name for p in (REPO / "docs").glob("*.md")} - {"models.md"})


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_plain(page: str) -> None:
    problems = list(problems_of_page((REPO / "docs" / page).read_text()))
    assert not problems, problems


def test_problems_of_pages_are_outside_of_code() -> None:
    text = "Read `nobody`, or one that is new.\n```\nanew\n```\nNobody reads it.\n"
    assert list(problems_of_page(text)) == [(5, "'Nobody'")]


SOURCE = '''
def size(x: int) -> int:
    """{docstring}

    Args:
        x: {argument}
    """
    {comment}
    return x
'''


@pytest.mark.parametrize(
    ("docstring", "argument", "comment", "problem"),
    [
        ("Returns the size.", "number of rows", "# Rows come first.", None),
        ("Of this rank.", "number of rows", "# Rows come first.", "a docstring opens with 'Of'"),
        ("Is it whole?", "number of rows", "# Rows come first.", "a docstring opens with 'Is'"),
        ("Returns the size.", "of the batch", "# Rows come first.", "the line of 'x' opens with"),
        ("Returns the size.", "number of rows", "# What comes first.", "a comment opens with"),
        ("Returns it anew.", "number of rows", "# Rows come first.", "'anew'"),
        ("Returns the size.", "number of rows", "# Nobody waits here.", "'Nobody'"),
    ],
)
def test_fragments_are_found(
    docstring: str, argument: str, comment: str, problem: str | None
) -> None:
    source = SOURCE.format(docstring=docstring, argument=argument, comment=comment)
    found = [text for _, text in problems_of(source)]
    assert (found == []) if problem is None else (problem in found[0] and len(found) == 1)
