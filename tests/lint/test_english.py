"""Docstrings and comments are plain English; see `tests/lint/english.py`."""

from __future__ import annotations

import pytest

from tests.lint.english import problems_below, problems_of, problems_of_page
from tests.lint.layers import REPO

ROOTS = ("benchmarks", "cmake", "csrc", "examples", "python", "scripts", "tests", "website")


@pytest.mark.sample(keep=len(ROOTS))
@pytest.mark.parametrize("root", ROOTS)
def test_docstrings_and_comments_are_plain(root: str) -> None:
    problems = problems_below(REPO / root)
    assert not problems, "\n".join(problems)


#: models.md is written by `python -m tests.zoo`
GENERATED = "models.md"


def test_pages_are_plain() -> None:
    pages = [page for page in sorted((REPO / "docs").glob("*.md")) if page.name != GENERATED]
    problems = [f"{page.name}:{at}" for page in pages for at in problems_of_page(page.read_text())]
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
