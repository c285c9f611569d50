"""The line budget: counts the lines of each room and compares them with a table.

``python -m tests.lint.budget [commit]`` prints the change of each room since a commit (HEAD by
default). ``--write`` writes ``budget.json``: it lowers limits, and raises one only with
``--reason``, which is kept beside the new limit.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.lint.layers import REPO

TABLE = Path(__file__).with_name("budget.json")
FOLDERS = ("csrc", "python")
_PYTHON = {".py", ".pyi"}
_CPP = {".h", ".cpp", ".cu", ".cuh"}
#: Files that the build writes into the packages.
_WRITTEN = {"_build_info.py", "_C.pyi"}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# A string or character literal, or a comment; whichever begins first.
_CPP_TOKEN = re.compile(
    r'R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])*'|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)


class Lines(NamedTuple):
    """Numbers of lines; blank lines count as neither."""

    code: int = 0
    text: int = 0  # docstrings and comments

    def plus(self, other: Lines) -> Lines:
        return Lines(self.code + other.code, self.text + other.text)


def count_python(source: str) -> Lines:
    """Counts a Python file; a string that is a statement of its own is text."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    text = set(docstrings)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            text.update(lines)
        elif token.type not in _LAYOUT:
            code.update(line for line in lines if line not in docstrings)
    blank = {n for n, line in enumerate(source.splitlines(), start=1) if not line.strip()}
    return Lines(len(code - blank), len(text - code - blank))


def count_cpp(source: str) -> Lines:
    """Counts a C++ or CUDA file; a line with code and a comment is code."""

    def marked(match: re.Match[str]) -> str:
        kept = "\x00" if match["comment"] else "x"
        return re.sub(r"[^\s]+", kept, match[0])

    code = text = 0
    for line in _CPP_TOKEN.sub(marked, source).splitlines():
        if line.replace("\x00", "").strip():
            code += 1
        elif line.strip():
            text += 1
    return Lines(code, text)


def room_of(path: str) -> str | None:
    """Returns the room of a file: ``csrc/comm``; ``python/smp`` for files beside the rooms.

    Args:
        path: path from the repository's root.

    Returns:
        None for files that are not counted.
    """
    *folders, name = path.split("/")
    if name in _WRITTEN or not name.endswith(tuple(_PYTHON | _CPP)):
        return None
    depth = 3 if folders[:2] == ["python", "smp"] else 2
    return "/".join(folders[:depth])


def count(files: Iterable[tuple[str, str]]) -> dict[str, Lines]:
    """Sums the lines of each room.

    Args:
        files: pairs of path from the repository's root and content.
    """
    rooms: dict[str, Lines] = {}
    for path, source in files:
        room = room_of(path)
        if room is not None:
            counter = count_cpp if Path(path).suffix in _CPP else count_python
            rooms[room] = rooms.get(room, Lines()).plus(counter(source))
    return dict(sorted(rooms.items()))


def files_of_tree(root: Path) -> Iterator[tuple[str, str]]:
    """Reads the files of a working tree."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _PYTHON | _CPP and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_text()


def files_of_commit(root: Path, commit: str) -> Iterator[tuple[str, str]]:
    """Reads the files of a commit."""
    command = ["git", "archive", "--format=tar", commit, "--", *FOLDERS]
    packed = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.isfile() and Path(member.name).suffix in _PYTHON | _CPP:
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read().decode()


Table = dict[str, dict[str, int | str]]


def complaints(rooms: dict[str, Lines], table: Table) -> list[str]:
    """Compares rooms with the table; returns one line for each room that breaks it."""
    found = []
    for room, lines in rooms.items():
        limit = table.get(room, {}).get("code")
        if limit is None:
            found.append(f"{room}: {lines.code} lines of code, not in the table")
        elif lines.code > int(limit):
            found.append(f"{room}: {lines.code} lines of code, {lines.code - int(limit)} too many")
    found += [f"{room}: in the table, but there is no such room" for room in table.keys() - rooms]
    return found


def updated(rooms: dict[str, Lines], table: Table, reason: str | None) -> Table:
    """Returns the table with today's counts.

    Args:
        rooms: counts of today.
        table: limits so far.
        reason: reason for limits that grow; None permits none to grow.

    Raises:
        ValueError: a limit would grow without a reason.
    """
    grown = [room for room in rooms if rooms[room].code > int(table.get(room, {}).get("code", 0))]
    if grown and not reason:
        raise ValueError(f"limits grow only with --reason: {', '.join(grown)}")
    result: Table = {}
    for room, lines in rooms.items():
        result[room] = {"code": lines.code, "text": lines.text}
        kept = reason if room in grown else table.get(room, {}).get("reason")
        if kept:
            result[room]["reason"] = kept
    return result


def as_json(table: Table) -> str:
    """Formats a table with one line for each room."""
    rows = [f"  {json.dumps(room)}: {json.dumps(row)}" for room, row in sorted(table.items())]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def report(before: dict[str, Lines], now: dict[str, Lines], table: Table) -> Iterator[str]:
    """Yields the printed table: a row for each room that changed, then the sums."""
    yield f"{'room':32}{'code':>8}{'change':>8}{'limit':>8}{'text':>8}{'change':>8}"
    then_all, now_all = Lines(), Lines()
    for room in sorted({*before, *now}):
        then, today = before.get(room, Lines()), now.get(room, Lines())
        then_all, now_all = then_all.plus(then), now_all.plus(today)
        if then != today:
            yield _row(room, then, today, str(table.get(room, {}).get("code", "-")))
    limits = sum(int(row["code"]) for row in table.values())
    yield _row("all rooms", then_all, now_all, str(limits))


def _row(name: str, then: Lines, today: Lines, limit: str) -> str:
    code, text = today.code - then.code, today.text - then.text
    return f"{name:32}{today.code:8}{code:+8}{limit:>8}{today.text:8}{text:+8}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lint.budget", description=__doc__)
    parser.add_argument("commit", nargs="?", default="HEAD", help="commit to compare with")
    parser.add_argument("--write", action="store_true", help="write the table with today's counts")
    parser.add_argument("--reason", help="why the rooms that grow are larger")
    options = parser.parse_args(arguments)
    now = count(files_of_tree(REPO))
    table: Table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if options.write:
        try:
            table = updated(now, table, options.reason)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        TABLE.write_text(as_json(table))
    for line in report(count(files_of_commit(REPO, options.commit)), now, table):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
