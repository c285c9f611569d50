"""Reports of commands: blocks that are printed for people, or written as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from smp.commands.ending import BadUse
from smp.pipeline.schedules import Simulation, TimelineEntry

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
svg { display: block; margin: 1em 0 } svg text { font: 11px system-ui, sans-serif }
pre { line-height: 1.35 }
.F { fill: #6aa9d8 } .B { fill: #e3a857 } .W { fill: #8fbf74 } .idle { fill: #f0f0f0 }
"""
_ROW, _LEFT, _WIDTH = 30, 70, 1100  # pixels of a timeline


@dataclass(frozen=True)
class Heading:
    """A heading of the blocks below it."""

    words: str

    def to_text(self) -> str:
        return f"\n{self.words}"

    def to_html(self) -> str:
        return f"<h2>{escape(self.words)}</h2>"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str

    def to_text(self) -> str:
        return self.words

    def to_html(self) -> str:
        return f"<p>{escape(self.words)}</p>"


@dataclass(frozen=True)
class Listing:
    """Lines whose spaces and breaks count."""

    lines: Sequence[str]

    def to_text(self) -> str:
        return "\n".join(["", *self.lines])

    def to_html(self) -> str:
        return f"<pre>{escape(chr(10).join(self.lines))}</pre>"


@dataclass(frozen=True)
class Table:
    """Rows of cells below the names of their columns.

    Attributes:
        columns: names of the columns.
        rows: cells of each row, one per column.
        text_columns: number of columns from the left whose cells begin at the left; cells of the
            others end at the right.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, object]], text_columns: int = 1) -> Table:
        """Returns a table of rows that map the names of columns to their cells.

        Args:
            rows: rows with the same keys; at least one.
            text_columns: see `Table`.
        """
        return cls(list(rows[0]), [[str(c) for c in row.values()] for row in rows], text_columns)

    def to_text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        return "\n".join(self._line(cells, widths) for cells in lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.ljust(width) if place < self.text_columns else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    def to_html(self) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

        return f"<table>{row('th', self.columns)}{''.join(row('td', r) for r in self.rows)}</table>"


@dataclass(frozen=True)
class OnPage:
    """HTML that pages show and terminals cannot."""

    html: str

    def to_text(self) -> None:
        return None

    def to_html(self) -> str:
        return self.html


Block = Heading | Text | Listing | Table | OnPage


def print_blocks(blocks: Sequence[Block]) -> None:
    """Prints blocks on the standard output; lines are as long as they have to be."""
    texts = (block.to_text() for block in blocks)
    print("\n".join(text for text in texts if text is not None))


def write_page(path: Path, title: str, blocks: Sequence[Block]) -> None:
    """Writes blocks as a page that loads nothing and runs no script.

    Raises:
        BadUse: The file cannot be written.
    """
    body = "\n".join(block.to_html() for block in blocks)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadUse(f"cannot write {str(path)!r}: {error.strerror}") from None


def folded(summary: str, lines: Sequence[str]) -> OnPage:
    """Returns lines that a page shows after a click on their summary."""
    text = escape("\n".join(lines))
    return OnPage(f"<details><summary>{escape(summary)}</summary><pre>{text}</pre></details>")


def timeline(simulation: Simulation, unit: str) -> OnPage:
    """Returns a picture with a row for each rank and a box for each action.

    Args:
        simulation: simulated step.
        unit: unit of its times.
    """
    scale = (_WIDTH - _LEFT) / simulation.makespan_ms if simulation.makespan_ms else 0.0
    height = len(simulation.ranks) * _ROW + 24
    parts = []
    for rank in range(len(simulation.ranks)):
        parts.append(f'<text x="0" y="{rank * _ROW + 18}">rank {rank}</text>')
        parts.append(_rectangle("idle", _LEFT, rank * _ROW + 2, _WIDTH - _LEFT))
    parts += [_box(entry, scale, unit) for entry in simulation.timeline]
    parts.append(f'<text x="{_LEFT}" y="{height - 6}">0</text>')
    parts.append(
        f'<text x="{_WIDTH}" y="{height - 6}" text-anchor="end">'
        f"{simulation.makespan_ms:.4g} {escape(unit)}</text>"
    )
    return OnPage(f'<svg width="{_WIDTH}" height="{height}" role="img">{"".join(parts)}</svg>')


def _box(entry: TimelineEntry, scale: float, unit: str) -> str:
    x, width = _LEFT + scale * entry.start_ms, scale * (entry.end_ms - entry.start_ms)
    y = entry.rank * _ROW
    words = (
        f"{entry.action} of stage {entry.stage} on rank {entry.rank}: {entry.start_ms:.4g} to "
        f"{entry.end_ms:.4g} {unit}"
    )
    box = _rectangle(entry.action[0], x, y + 2, width, f"<title>{escape(words)}</title>")
    if width <= 7 * len(entry.action):
        return box
    return box + f'<text x="{x + 3:.2f}" y="{y + 18}">{escape(entry.action)}</text>'


def _rectangle(kind: str, x: float, y: float, width: float, inside: str = "") -> str:
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 6}"'
    return f'<rect class="{kind}" {place} stroke="#fff" stroke-width="0.5">{inside}</rect>'
