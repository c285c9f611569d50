"""The page of a run: JSON lines of all parts as tables. Pure but for `main`.

``python -m benchmarks.gpu.page --out FOLDER`` writes it next to the lines. If all of them are of a
GPU it also goes to benchmarks/results, with the lines; a dry run never does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import UNNAMED
from benchmarks.gpu.figures import REPO, lines_of
from benchmarks.gpu.parts import PARTS

RESULTS = REPO / "benchmarks" / "results"
Line = Mapping[str, Any]


def read(folder: Path) -> list[Line]:
    """Lines of all parts in a folder."""
    return [line for part in PARTS for line in lines_of(folder / f"{part}.jsonl")]


def is_dry(lines: Sequence[Line]) -> bool:
    """Returns whether some figure was not measured on a GPU."""
    return any(line["is_dry"] for line in lines)


def name_of(lines: Sequence[Line]) -> str:
    """Device and month of the first line, as the other results have them: "nvidia_h200_202611"."""
    # Before a process has reached the device, its lines have no other name for it.
    named = [line["device"] for line in lines if line["device"] != UNNAMED]
    device = re.sub(r"[^a-z0-9]+", "_", (named or [UNNAMED])[0].lower()).strip("_")
    return f"{device}_{lines[0]['time'][:7].replace('-', '')}"


def page(lines: Sequence[Line]) -> str:
    """Markdown; equal lines make equal pages.

    Raises:
        ValueError: there are no lines.
    """
    if not lines:
        raise ValueError("there are no figures; run a part first: make gpu PART=kernels")
    devices = ", ".join(sorted({line["device"] for line in lines} - {UNNAMED}) or [UNNAMED])
    title = f"# `make gpu`: {devices} ({lines[0]['time'][:7]})"
    blocks = [title, *_dry_note(lines), _summary(lines), _versions(lines)]
    for name, part in PARTS.items():
        of_part = [line for line in lines if line["part"] == name]
        table = _table(of_part) if of_part else "Did not run."
        blocks += [f"## {part.words} (`{name}`)", table]
    return "\n\n".join(blocks) + "\n"


def _dry_note(lines: Sequence[Line]) -> list[str]:
    if not is_dry(lines):
        return []
    return [
        "**A dry run: no figure on this page was measured on a GPU.** It shows that the scripts "
        "work, at tiny sizes, on a CPU."
    ]


def _summary(lines: Sequence[Line]) -> str:
    counts = {
        state: sum(line["state"] == state for line in lines)
        for state in ("ok", "missed", "skipped", "failed")
    }
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    return (
        f'{len(lines)} lines: {words}. "Missed" is measured and not what was aimed at, '
        'or did not end in time; "failed" is wrong.'
    )


def _versions(lines: Sequence[Line]) -> str:
    commits = ", ".join(sorted({line["commit"] for line in lines}))
    found: dict[str, set[str]] = {}
    for line in lines:
        for name, version in line["versions"].items():
            found.setdefault(name, set()).add(version)
    words = ", ".join(f"{name} {'/'.join(sorted(found[name]))}" for name in sorted(found))
    return f"Commit {commits}; {words}."


def _table(lines: Sequence[Line]) -> str:
    rows = ["| figure | value | wanted | state | note |", "|---|---:|---|---|---|"]
    for line in lines:
        value = "" if line["value"] is None else f"{shown(line['value'])} {line['unit']}".strip()
        wanted = line["bound"] or line["expected"]
        cells = (line["name"], value, wanted, line["state"], line["note"])
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(rows)


def shown(value: float) -> str:
    """Four digits; whole numbers whole."""
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.4g}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def write(folder: Path, results: Path, name: str = "") -> list[Path]:
    """Writes the page; returns where.

    Args:
        folder: folder with the lines of the parts.
        results: gets page and lines if all of them are of a GPU, unless it cannot be written.
        name: name of the run; device and month if empty.
    """
    lines = read(folder)
    text = page(lines)
    name = name or name_of(lines)
    targets = [folder / f"gpu_{name}.md"]
    if not is_dry(lines) and os.access(results, os.W_OK):
        targets.append(results / f"gpu_{name}.md")
        (results / f"gpu_{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
    for target in targets:
        target.write_text(text, encoding="utf-8")
    return targets


def main() -> int:
    parser = argparse.ArgumentParser(description="makes a page of the figures of make gpu")
    parser.add_argument("--out", type=Path, default=REPO / "build" / "gpu")
    parser.add_argument("--name", default="")
    arguments = parser.parse_args()
    try:
        for path in write(arguments.out, RESULTS, arguments.name):
            print(f"page: {path}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
