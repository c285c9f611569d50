"""A partition as a small text file that people can read, edit and use again.

    smp partition v1
    partitions 2
    # comments and empty lines are free
    transformer.wte        0
    transformer.h.[0-5]    0
    transformer.h.[6-11]   1
    lm_head                0

Each line has a module and its rank, which hold for all modules below as well. If several lines
name modules above a module, the longest name counts, in any order of lines. ``[a-b]`` is a range of
numbers. After ``chunks 2`` below ``partitions`` a rank may have a chunk: ``1.0``. Modules without
parameters, and modules that are cut, need no line: they follow the rules of the automatic
partition.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import smp._C as _C
from smp.config import given_files
from smp.partition.decision import Decision
from smp.partition.tree import ModuleIndex

_HEADER = "smp partition v1"
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
_PLACE = re.compile(r"(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class _Wish:
    """A place that the file gives to a module, with the line."""

    partition_idx: int
    chunk_idx: int
    line: int


def write(decision: Decision, path: str | Path) -> None:
    """Writes a decision, so that `read` returns the same.

    The file appears as a whole or not at all. The function is called on one rank.
    """
    lines = [_HEADER, f"partitions {decision.num_partitions}"]
    if decision.num_chunks > 1:
        lines.append(f"chunks {decision.num_chunks}")
    lines += [f"# {line}" for line in decision.text.splitlines()[1:]]
    entries = list(_collapsed(top_most(decision)))
    width = max((len(pattern) for pattern, _ in entries), default=0)
    lines += [f"{pattern:<{width}}  {place}" for pattern, place in entries]
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text("\n".join(lines) + "\n")
    partial.replace(path)


def top_most(decision: Decision) -> Iterator[tuple[str, str]]:
    """Yields name and place of modules that cover everything below them, in order."""
    index = decision.index
    units = _C.unit_places(index.tree)
    chunks = decision.chunk_idxs or (0,) * len(index.modules)
    places = list(zip(decision.partition_idxs, chunks, strict=True))
    whole = [True] * len(units)
    for idx in range(len(units) - 1, 0, -1):
        parent = index.parents[idx]
        whole[parent] &= whole[idx] and places[idx] == places[parent]
    for idx, names in enumerate(index.names):
        below_whole = idx > 0 and whole[index.parents[idx]] and index.parents[idx] > 0
        speaks = (whole[idx] and index.has_parameters[idx]) or units[idx] >= 0
        if below_whole or not speaks:
            continue
        partition_idx, chunk_idx = places[idx]
        place = f"{partition_idx}.{chunk_idx}" if decision.num_chunks > 1 else f"{partition_idx}"
        if idx > 0:
            yield names[0], place


def _collapsed(entries: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Joins ``a.0``, ``a.1``, ``a.2`` in one place to ``a.[0-2]``."""
    run: tuple[str, int, int, str] | None = None  # stem, first, last, place

    def text(run: tuple[str, int, int, str]) -> tuple[str, str]:
        stem, first, last, place = run
        return (f"{stem}{first}" if first == last else f"{stem}[{first}-{last}]"), place

    for name, place in entries:
        stem, dot, last_part = name.rpartition(".")
        number = int(last_part) if re.fullmatch(r"0|[1-9]\d*", last_part) else None
        if run is not None:
            if number is not None and run[0] == stem + dot and run[2:] == (number - 1, place):
                run = (run[0], run[1], number, place)
                continue
            yield text(run)
            run = None
        if number is None:
            yield name, place
        else:
            run = (stem + dot, number, number, place)
    if run is not None:
        yield text(run)


def read(path: str | Path, index: ModuleIndex, pp_size: int, num_chunks: int = 1) -> _C.Assignment:
    """Returns the assignment that a file describes.

    Args:
        path: path of a file written by `write`, or by hand.
        index: the modules of the model.
        pp_size, num_chunks: numbers of ranks and chunks of this run; the file must have the same.

    Raises:
        ValueError: the file is malformed or does not fit the model; the text names the line.
        OSError: the file cannot be read.
    """
    return _Reader(Path(path), index, pp_size, num_chunks).read()


class _Reader:
    def __init__(self, path: Path, index: ModuleIndex, pp_size: int, num_chunks: int) -> None:
        self._path = path
        self._index = index
        self._pp_size = pp_size
        self._num_chunks = num_chunks
        self._idx_of_name = {name: idx for idx, names in enumerate(index.names) for name in names}
        self._wishes: dict[int, _Wish] = {}

    def read(self) -> _C.Assignment:
        content = given_files.read_text(self._path).splitlines()
        lines = [
            (number, stripped)
            for number, line in enumerate(content, start=1)
            if (stripped := line.split("#")[0].strip())
        ]
        lines = self._read_head(lines)
        for number, line in lines:
            self._read_line(number, line)
        return self._assignment()

    def _error(self, line: int | None, text: str) -> ValueError:
        where = f"{self._path}" if line is None else f"{self._path}, line {line}"
        return ValueError(f"{_C.rank_prefix()}partition file {where}: {text}")

    def _read_head(self, lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
        number, first = lines[0] if lines else (1, "")
        if first != _HEADER:
            raise self._error(number, f"expected '{_HEADER}', got {first!r}")
        expected = {"partitions": self._pp_size, "chunks": self._num_chunks}
        found: dict[str, int] = {}
        rest = lines[1:]
        while rest:
            number, line = rest[0]
            key, *values = line.split()
            if key not in expected or key in found:
                break
            if len(values) != 1 or not values[0].isdecimal():
                raise self._error(number, f"expected '{key} <number>', got {line!r}")
            found[key] = int(values[0])
            del rest[0]
        found.setdefault("chunks", 1)
        if "partitions" not in found:
            raise self._error(number, f"expected 'partitions {self._pp_size}' after the header")
        for key, value in found.items():
            if value != expected[key]:
                raise self._error(
                    None,
                    f"it is for {value} {key}, this run has {expected[key]}; use the file of such "
                    "a run or let the partition be decided anew",
                )
        return rest

    def _read_line(self, number: int, line: str) -> None:
        words = line.split()
        place = _PLACE.fullmatch(words[-1])
        if len(words) != 2 or place is None:
            raise self._error(number, f"expected '<module> <rank>', got {line!r}")
        wish = _Wish(int(place[1]), int(place[2] or 0), number)
        for what, value, size in (
            ("rank", wish.partition_idx, self._pp_size),
            ("chunk", wish.chunk_idx, self._num_chunks),
        ):
            if value >= size:
                raise self._error(number, f"{what} {value} must be in [0, {size})")
        for name in _expand(words[0]):
            idx = self._idx_of_name.get(name)
            if idx is None:
                raise self._error(number, self._unknown(name))
            if idx in self._wishes:
                raise self._error(
                    number, f"module '{name}' is in line {self._wishes[idx].line} already"
                )
            self._wishes[idx] = wish

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, [n for n in self._idx_of_name if n], n=3)
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
        return f"the model has no module '{name}'{hint}"

    def _assignment(self) -> _C.Assignment:
        units = _C.unit_places(self._index.tree)
        wishes: list[_Wish | None] = []
        for idx, parent in enumerate(self._index.parents):
            inherited = wishes[parent] if idx > 0 else None
            wishes.append(self._wishes.get(idx, inherited))
        decided: dict[int, tuple[_Wish, int]] = {}  # by unit: the wish, and its module
        for idx, place in enumerate(units):
            wish = wishes[idx]
            if place >= 0 and wish is not None:
                self._check_together(wish, idx, *decided.setdefault(place, (wish, idx)))
        partitions = [0] * len(units)
        chunks = [0] * len(units)
        for place in sorted(set(units) - {-1}):
            if place not in decided:
                name = self._index.names[place][0] or "(root)"
                raise self._error(None, f"no line is about module '{name}'; add one")
            wish, _ = decided[place]
            partitions[place], chunks[place] = wish.partition_idx, wish.chunk_idx
        return _C.complete_partition(
            self._index.tree, self._pp_size, partitions, self._num_chunks, chunks
        )

    def _check_together(self, wish: _Wish, idx: int, other: _Wish, other_idx: int) -> None:
        if (other.partition_idx, other.chunk_idx) == (wish.partition_idx, wish.chunk_idx):
            return
        names = self._index.names
        raise self._error(
            wish.line,
            f"module '{names[idx][0]}' must be where '{names[other_idx][0]}' is (rank "
            f"{other.partition_idx}, line {other.line}), because they share a parameter or belong "
            "to one module that stays whole",
        )


def _expand(pattern: str) -> Iterator[str]:
    """Yields names of a range: ``a.[0-2].b`` as ``a.0.b``, ``a.1.b``, ``a.2.b``."""
    match = _RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    for number in range(int(match[1]), int(match[2]) + 1):
        yield from _expand(f"{pattern[: match.start()]}{number}{pattern[match.end() :]}")
