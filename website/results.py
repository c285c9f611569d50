"""Lines of `benchmarks/results`, and the conditions under which they were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "benchmarks" / "results"

Line = dict[str, Any]


def read(name: str) -> list[Line]:
    """The lines of a file.

    Args:
        name: name of a file of `benchmarks/results`, without its suffix.
    """
    text = (RESULTS / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def conditions(lines: Iterable[Line], repeats: str = "") -> str:
    """Describes the conditions of a figure: machine, load, versions, repeats, commit.

    Args:
        lines: lines that are in the figure.
        repeats: number of repeats, where the lines have the number asked for at first.

    Raises:
        ValueError: a line does not say where it was measured.
    """
    lines = list(lines)
    places = [_place(line) for line in lines]
    cores = _both(f"{p['num_cores']} virtual cores" for p in places)
    repeats = repeats or _both(str(line.get("repeats") or line["num_sums"]) for line in lines)
    threads = _both(str(line["num_processes"]) for line in lines if "num_processes" in line)
    loads = [float(p["load_average"]) for p in places]
    words = [
        f"{_both(p['cpu'].replace('(R)', '') for p in places)}, {cores}, CPU only",
        _both(p["time"][:10] for p in places),
        f"load average {_range(loads)} at the start",
        f"torch {_both(p['torch'].split('+')[0] for p in places)}",
        *([f"{threads} process{'' if threads == '1' else 'es'}"] if threads else []),
        f"{repeats} repeats",
        _commits(p["commit"] for p in places),
    ]
    return "; ".join(words)


def _place(line: Line) -> Line:
    place = line.get("environment", line)
    missing = {"cpu", "num_cores", "load_average", "time", "torch", "commit"} - place.keys()
    if missing:
        name = line.get("contender", line.get("benchmark"))
        raise ValueError(f"line {name!r} of the results does not say its {sorted(missing)}")
    return dict(place)


def _commits(names: Iterable[str]) -> str:
    known = [name for name in names if name != "none"]
    return f"commit {_both(known)}" if known else "commit not recorded"


def _both(words: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(words))


def _range(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"
