"""Plots as SVG text that takes its colours from the page around it, by day and by night.

Only this module draws, and it draws numbers that are not rounded. The meaning of a mark is in its
`<title>`, which browsers show under the pointer.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 760.0
_CHAR = 6.9  # of a label, at its size of 12
_ROW = 22.0
_AXIS = 40.0


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times, with the quartiles of its repeats.

    Attributes:
        label: name of the measurement.
        group: heading of the rows of one group; "" has none.
        median, low, high: median of the repeats, and their quartiles.
    """

    label: str
    group: str
    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``less`` or ``more`` where the quartiles are on one side of 1, otherwise ``even``."""
        if self.high < 1.0:
            return "less"
        return "more" if self.low > 1.0 else "even"


@dataclass(frozen=True)
class Bar:
    """A length in a bar chart.

    Attributes:
        label: label of the row.
        series: meaning of the bar's colour.
        value: length in the unit of the chart.
    """

    label: str
    series: str
    value: float


@dataclass(frozen=True)
class Point:
    """Predicted against measured."""

    label: str
    measured: float
    predicted: float


def ratio_chart(rows: Sequence[Ratio], axis: str) -> str:
    """A row per ratio: a dot at the median, a line between the quartiles, and a line at 1.

    Args:
        rows: ratios in the order of the chart; those of one group behind each other.
        axis: label of the axis: names the dividend and the divisor.
    """
    low, high = _padded(min(1.0, *(r.low for r in rows)), max(1.0, *(r.high for r in rows)))
    left = _left(row.label for row in rows)
    x = _scale(low, high, left)
    parts, y, group = [], 8.0, ""
    for row in rows:
        if row.group != group:
            group = row.group
            y += 4.0
            parts.append(_text(0, y + 15, group, "chart-group"))
            y += _ROW
        middle = y + _ROW / 2
        title = f"{row.label}: {row.median:.3f} ({row.low:.3f} to {row.high:.3f})"
        parts.append(
            f'<g class="chart-{row.verdict}"><title>{html.escape(title)}</title>'
            + _text(left - 10, middle + 4, row.label, "chart-label", "end")
            + _line(x(row.low), middle, x(row.high), middle, "chart-range")
            + f'<circle cx="{x(row.median):.1f}" cy="{middle:.1f}" r="4.5"/>'
            + _text(WIDTH - 46, middle + 4, f"{row.median:.2f}", "chart-value")
            + "</g>"
        )
        y += _ROW
    one = _line(x(1.0), 4, x(1.0), y + 4, "chart-one")
    return _svg(y + _AXIS, [*_axis(low, high, x, y + 4, axis), one, *parts])


def bar_chart(rows: Sequence[Bar], axis: str) -> str:
    """Bars from 0 on; those of one label below each other, with one colour per series.

    Args:
        rows: bars in the order of the chart.
        axis: quantity that the length shows, with its unit.
    """
    series = list(dict.fromkeys(row.series for row in rows))
    left = _left(row.label for row in rows)
    high = _padded(0.0, max(row.value for row in rows))[1]
    x = _scale(0.0, high, left)
    parts = _legend(series, left)
    y, label = 30.0, None
    for row in rows:
        if row.label != label:
            label = row.label
            y += 6.0
            num_bars = sum(other.label == label for other in rows)
            parts.append(_text(left - 10, y + num_bars * 8 + 4, label, "chart-label", "end"))
        kind = series.index(row.series)
        title = f"{row.label}, {row.series}: {row.value:.4g}"
        parts.append(
            f'<g><title>{html.escape(title)}</title><rect class="chart-series-{kind}" '
            f'x="{left:.1f}" y="{y:.1f}" width="{max(x(row.value) - left, 0.5):.1f}" height="13"/>'
            + _text(x(row.value) + 5, y + 11, f"{row.value:.3g}", "chart-value")
            + "</g>"
        )
        y += 16.0
    return _svg(y + _AXIS, [*_axis(0.0, high, x, y + 4, axis), *parts])


def scatter(points: Sequence[Point], unit: str) -> str:
    """Predicted over measured, with the diagonal of exact predictions.

    Args:
        points: points; their labels are shown under the pointer.
        unit: unit of both axes.
    """
    high = _padded(0.0, max(max(p.measured, p.predicted) for p in points))[1]
    left, size = 70.0, 340.0
    x = _scale(0.0, high, left, left + size)
    top = 10.0

    def y(value: float) -> float:
        return top + size - value / high * size

    parts = _axis(0.0, high, x, top + size, f"measured, {unit}")
    for tick in _ticks(0.0, high):
        parts.append(_text(left - 8, y(tick) + 4, f"{tick:g}", "chart-tick", "end"))
        parts.append(_line(left, y(tick), left + size, y(tick), "chart-grid"))
    parts.append(_line(x(0), y(0), x(high), y(high), "chart-one"))
    parts.append(
        '<text class="chart-tick" text-anchor="middle" '
        f'transform="translate(16 {top + size / 2:.0f}) rotate(-90)">'
        f"predicted, {html.escape(unit)}</text>"
    )
    for point in points:
        title = f"{point.label}: predicted {point.predicted:.4g}, measured {point.measured:.4g}"
        parts.append(
            f'<circle class="chart-series-0" cx="{x(point.measured):.1f}" '
            f'cy="{y(point.predicted):.1f}" r="4.5"><title>{html.escape(title)}</title></circle>'
        )
    return _svg(top + size + _AXIS, parts)


def _padded(low: float, high: float) -> tuple[float, float]:
    """A range with room at both ends; a 0 stays where it is."""
    room = (high - low) * 0.06 or 0.1
    return (low if low == 0.0 else max(0.0, low - room)), high + room


def _left(labels: object) -> float:
    longest = max(len(label) for label in labels)  # type: ignore[attr-defined]
    return min(340.0, 16.0 + longest * _CHAR)


class _scale:
    """Maps a value to its place on an axis."""

    def __init__(self, low: float, high: float, left: float, right: float = WIDTH - 60.0) -> None:
        self._low, self._left = low, left
        self._factor = (right - left) / (high - low)
        self.right = right

    def __call__(self, value: float) -> float:
        return self._left + (value - self._low) * self._factor


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, six or so."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _axis(low: float, high: float, x: _scale, y: float, words: str) -> list[str]:
    parts = [_line(x(low), y, x.right, y, "chart-axis")]
    for tick in _ticks(low, high):
        parts.append(_line(x(tick), 4, x(tick), y, "chart-grid"))
        parts.append(_text(x(tick), y + 14, f"{tick:g}", "chart-tick", "middle"))
    return [*parts, _text((x(low) + x.right) / 2, y + 29, words, "chart-tick", "middle")]


def _legend(series: Sequence[str], left: float) -> list[str]:
    parts, x = [], left
    for kind, words in enumerate(series):
        parts.append(
            f'<rect class="chart-series-{kind}" x="{x:.0f}" y="6" width="12" height="12"/>'
        )
        parts.append(_text(x + 17, 16, words, "chart-tick"))
        x += 34 + len(words) * _CHAR
    return parts


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{where}>{html.escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {WIDTH:.0f} {height:.0f}">'
    )
    return "".join([head, *parts, "</svg>"])
