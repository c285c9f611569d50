"""Finds docstrings and comments that are not plain English, by the rule of CONTRIBUTING.

Openings say what a thing is or does: a function's docstring opens with a verb, an argument's line
with a noun. The lists below hold words that open a fragment, and phrases that hide the subject.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: words that open no docstring
OPENINGS = frozenset(
    "of that those these this it its they their them what which who whose whom whether how where "
    "when while why as for by with without in on at from to into than then so such some none "
    "nobody nothing is are was were does do did has have had may might can could must should "
    "will would shall one ones all any both each if unless until because though also only not no "
    "and or but there here".split()
)
#: openings of an argument's line that begin a fragment
FRAGMENTS = OPENINGS - frozenset("all any both each one no some none whether".split())
#: openings of comments
COMMENT_OPENINGS = frozenset("of that those what whose which it they its them".split())
#: openings of comments inside of C++ functions, where a reason may come first
FREE_IN_CPP = frozenset(
    "all any both each if while when without with in on at from to than then so such some no not "
    "only also and or but there here one until because though will may can must should".split()
)
#: phrases that are said in another way
PHRASES = (
    r"\banew\b",
    r"\bthe begin\b",
    r"\bat hand\b",
    r"\bas ever\b",
    r"\blets? go of\b",
    r"\bone that\b",
    r"\bnobody\b",
    r"\bsomebody\b",
    r"\banybody\b",
    r"\bfurther ado\b",
    r"\bstands? (?:in|for|at|behind|around|there)\b",
)
#: phrases that pages may use
FREE_IN_PAGES = frozenset({r"\bone that\b"})
_PHRASE = re.compile("|".join(PHRASES), re.IGNORECASE)
_PHRASE_OF_PAGE = re.compile("|".join(p for p in PHRASES if p not in FREE_IN_PAGES), re.IGNORECASE)
_CODE_OF_PAGE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"\s*(Args|Attributes|Returns|Yields|Raises):\s*$")
_CPP_COMMENT = re.compile(r"\s*//[/!]?\s?(.*)")
_ITEM = re.compile(r"^([\w*, .`]+?)(?: \([^)]*\))?: (.*)$")


def problems_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields line numbers and problems of a Python source."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        line = node.body[0].lineno
        yield from ((line + offset, problem) for offset, problem in _problems_of_docstring(text))
    if not any(map(_may_have_a_problem, source.splitlines())):  # tokens take longest
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _problems_of_comment(token)


def _problems_of_docstring(text: str) -> Iterator[tuple[int, str]]:
    lines = text.splitlines()
    first = _first_word(lines[0]) if lines else ""
    if first in OPENINGS:
        yield 0, f"a docstring opens with '{lines[0].split()[0]}'"
    in_items = False
    for offset, line in enumerate(lines):
        if match := _PHRASE.search(line):
            yield offset, f"'{match[0]}'"
        if section := _SECTION.match(line):
            in_items = section[1] in ("Args", "Attributes")
        elif in_items and line.strip() and not line.startswith(" "):
            in_items = False
        elif in_items and line.startswith("    ") and not line.startswith("     "):
            item = _ITEM.match(line.strip())
            if item and _first_word(item[2]) in FRAGMENTS:
                yield offset, f"the line of '{item[1]}' opens with '{item[2].split()[0]}'"


def _problems_of_comment(token: tokenize.TokenInfo) -> Iterator[tuple[int, str]]:
    text = token.string.lstrip("#: ")
    is_alone = token.line[: token.start[1]].strip() == ""
    if is_alone and text[:1].isupper() and _first_word(text) in COMMENT_OPENINGS:
        yield token.start[0], f"a comment opens with '{text.split()[0]}'"
    if match := _PHRASE.search(text):
        yield token.start[0], f"'{match[0]}'"


def _may_have_a_problem(line: str) -> bool:
    """Returns whether a line would have one if all behind some ``#`` of it were a comment."""
    return any(
        _first_word(text.lstrip(": ")) in COMMENT_OPENINGS or _PHRASE.search(text)
        for text in line.split("#")[1:]
    )


def _first_word(text: str) -> str:
    match = re.match(r"[A-Za-z']+", text.strip())
    return match[0].lower() if match else ""


def problems_of_cpp(source: str) -> Iterator[tuple[int, str]]:
    """Yields line numbers and problems of a C++ source, of comments on lines of their own."""
    continues = False
    for number, line in enumerate(source.splitlines(), start=1):
        comment = _CPP_COMMENT.match(line)
        text = comment[1] if comment else ""
        opens = not continues and text[:1].isupper() and _first_word(text) in OPENINGS
        if opens and _first_word(text) not in FREE_IN_CPP:
            yield number, f"a comment opens with '{text.split()[0]}'"
        if match := _PHRASE.search(text):
            yield number, f"'{match[0]}'"
        continues = comment is not None


def problems_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yields line numbers and problems of a page in Markdown, of text outside of code."""
    text = _CODE_OF_PAGE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _PHRASE_OF_PAGE.search(line):
            yield number, f"'{match[0]}'"


def problems_below(root: Path) -> list[str]:
    """Returns the problems of all Python and C++ files below a folder, with their places."""
    finders = dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), problems_of_cpp) | {".py": problems_of}
    return [
        f"{path.relative_to(root).as_posix()}:{line}: {problem}"
        for path in sorted(root.rglob("*.*"))
        if path.suffix in finders
        for line, problem in sorted(finders[path.suffix](path.read_text()))
    ]
