"""Pages of plans: one file each, nothing comes from elsewhere, no script runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from smp.pipeline.schedules import Simulation

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
svg { display: block; margin: 1em 0 } svg text { font: 11px system-ui, sans-serif }
details { margin: 1em 0 } pre { line-height: 1.35 }
.F { fill: #6aa9d8 } .B { fill: #e3a857 } .W { fill: #8fbf74 } .idle { fill: #f0f0f0 }
.bar { fill: #6aa9d8 }
"""
_ROW, _LEFT, _WIDTH = 30, 70, 1100


def page(title: str, parts: Sequence[str]) -> str:
    """An HTML document of parts that are HTML already."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def folded(summary: str, lines: Sequence[str]) -> str:
    """Lines that are shown when somebody asks for them."""
    text = escape("\n".join(lines))
    return f"<details><summary>{escape(summary)}</summary><pre>{text}</pre></details>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"


def timeline(simulation: Simulation, unit: str) -> str:
    """One row per rank; each action is a box that tells its times.

    Args:
        simulation: the step.
        unit: of its times.
    """
    ranks = len(simulation.ranks)
    scale = (_WIDTH - _LEFT) / simulation.makespan_ms if simulation.makespan_ms else 0.0
    height = ranks * _ROW + 24
    boxes = []
    for rank in range(ranks):
        y = rank * _ROW
        boxes.append(f'<text x="0" y="{y + 18}">rank {rank}</text>')
        boxes.append(
            f'<rect class="idle" x="{_LEFT}" y="{y + 2}" width="{_WIDTH - _LEFT}" '
            f'height="{_ROW - 6}"/>'
        )
    for entry in simulation.timeline:
        x, width = _LEFT + scale * entry.start_ms, scale * (entry.end_ms - entry.start_ms)
        y = entry.rank * _ROW
        words = (
            f"{entry.action} of stage {entry.stage} on rank {entry.rank}: {entry.start_ms:.4g} to "
            f"{entry.end_ms:.4g} {unit}"
        )
        boxes.append(
            f'<rect class="{entry.action[0]}" x="{x:.2f}" y="{y + 2}" width="{width:.2f}" '
            f'height="{_ROW - 6}" stroke="#fff" stroke-width="0.5"><title>{escape(words)}</title>'
            "</rect>"
        )
        if width > 7 * len(entry.action):
            boxes.append(f'<text x="{x + 3:.2f}" y="{y + 18}">{escape(entry.action)}</text>')
    boxes.append(
        f'<text x="{_LEFT}" y="{height - 6}">0</text><text x="{_WIDTH}" y="{height - 6}" '
        f'text-anchor="end">{simulation.makespan_ms:.4g} {escape(unit)}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" role="img">'
        + "".join(boxes)
        + "</svg>"
    )


def bars(rows: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars of shares in [0, 1], each with its name."""
    largest = max((share for _, share in rows), default=0.0) or 1.0
    parts = []
    for number, (name, share) in enumerate(rows):
        y = number * 20
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(
            f'<rect class="bar" x="330" y="{y + 3}" width="{600 * share / largest:.1f}" '
            f'height="14"/><text x="{335 + 600 * share / largest:.1f}" y="{y + 14}">'
            f"{100 * share:.1f} %</text>"
        )
    return f'<svg width="1000" height="{len(rows) * 20 + 4}" role="img">{"".join(parts)}</svg>'
