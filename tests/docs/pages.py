"""Fenced blocks of the documents, and what the comment in front of each says about them.

``<!-- run: 2; with: gptj -->`` stands on the line above a block (invisible when it is rendered):

* ``run: N``: a Python script for N processes, or a diff of such scripts;
  ``run: N, M``: first with N processes, then with M (of a diff: the old script with N);
* ``spares: N``: with N processes more, which wait for the places of ranks;
* ``continues``: goes on where the block before ended, in the same script;
* ``file: NAME``: is also saved under this name, where later commands of the page find it;
* ``with: NAME``: ``tests/docs/setup/NAME.py`` has the names that the block leaves out, and may have
  ``after(names)``, which looks at what the block did;
* ``ends: STATUS``: the script, or the commands, end with this status;
* ``prints``: the lines of this text are in what the block before printed; ``...`` means any text;
* ``not run: REASON``: no test can run it.

Commands are parsed by their programs; ``smp estimate`` and ``smp plan`` are executed, and
``smp ckpt`` where its folder is there. Their marks, and those of text, may be missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]

_MARK = re.compile(r"<!--\s*(.*?)\s*-->\s*\Z")
_KEYS = {"run", "spares", "continues", "file", "with", "ends", "prints", "not run"}
#: Languages, and the marks of which a block has to have one.
LANGUAGES: dict[str, frozenset[str]] = {
    "python": frozenset({"run", "continues", "not run"}),
    "diff": frozenset({"run", "not run"}),
    "sh": frozenset(),
    "text": frozenset(),
    "json": frozenset(),
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path of the page.
        line: number of the fence's line, from 1.
        language: word behind the fence.
        source: text of the block.
        marks: values of the marks by key; a key without a value has "".
    """

    page: Path
    line: int
    language: str
    source: str
    marks: dict[str, str]

    @property
    def where(self) -> str:
        return (
            f"{self.page.relative_to(REPO) if REPO in self.page.parents else self.page}:{self.line}"
        )


def blocks_of(page: Path) -> list[Block]:
    """Returns all blocks of a page.

    Raises:
        ValueError: a block does not say how it is checked; the message names it.
    """
    found: list[Block] = []
    lines = page.read_text().splitlines()
    begin = None
    for number, line in enumerate(lines, start=1):
        if not line.lstrip().startswith("```"):
            continue
        if begin is None:
            begin = number
            continue
        above = lines[begin - 2] if begin > 1 else ""
        block = Block(
            page,
            begin,
            lines[begin - 1].strip().removeprefix("```"),
            "\n".join(lines[begin : number - 1]) + "\n",
            _marks_of(above, f"{page.name}:{begin - 1}"),
        )
        _check(block)
        found.append(block)
        begin = None
    if begin is not None:
        raise ValueError(f"{page.name}:{begin}: this block has no end")
    return found


def _marks_of(line: str, where: str) -> dict[str, str]:
    match = _MARK.match(line.strip())
    if match is None:
        return {}
    marks: dict[str, str] = {}
    for part in match.group(1).split(";"):
        key, _, value = (word.strip() for word in part.partition(":"))
        if key not in _KEYS:
            raise ValueError(f"{where}: unknown mark {key!r}; there are {sorted(_KEYS)}")
        marks[key] = value
    return marks


def _check(block: Block) -> None:
    if block.language not in LANGUAGES:
        raise ValueError(
            f"{block.where}: language {block.language!r}; write one of {sorted(LANGUAGES)}"
        )
    needed = LANGUAGES[block.language]
    if needed and not needed & block.marks.keys():
        raise ValueError(f"{block.where}: needs one of the marks {sorted(needed)}")
    if "not run" in block.marks and not block.marks["not run"]:
        raise ValueError(f"{block.where}: give the reason, 'not run: REASON'")


def missing_lines(block: Block, output: str) -> list[str]:
    """Lines of a block marked ``prints`` that nothing in ``output`` fits."""
    return [line for line in block.source.splitlines() if not re.search(_pattern(line), output)]


def _pattern(line: str) -> str:
    words = re.split(r"\s+", line.strip())
    return r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*?") for word in words)
