"""The table of losses: how each came out in each layout."""

from __future__ import annotations

from pathlib import Path

from tests.losses.case import DIFFERENT
from tests.losses.catalogue import CASES
from tests.losses.running import LAYOUTS, Result

_BEGIN = "| loss | weight |"


def write(page: Path, results: list[Result]) -> None:
    """Writes the table at the end of a page, whose words stay.

    Raises:
        ValueError: the page has no table.
    """
    words, begin, _ = page.read_text().partition(_BEGIN)
    if not begin:
        raise ValueError(f"{page} has no line that begins with '{_BEGIN}'")
    page.write_text(words + "\n".join(table(results)) + "\n")


def table(results: list[Result]) -> list[str]:
    """Returns the lines of the table, in the order of the catalogue."""
    layouts = [layout for layout in LAYOUTS if any(r.layout == layout for r in results)]
    rows: dict[tuple[str, bool], dict[str, Result]] = {}
    for result in results:
        rows.setdefault((result.name, result.has_weight), {})[result.layout] = result
    lines = [f"{_BEGIN} {' | '.join(layouts)} |", "|---|---|" + "---|" * len(layouts)]
    for name, case in CASES.items():
        for has_weight in (False, True):
            found = rows.get((name, has_weight))
            if found is not None:
                cells = [_cell(found[layout]) if layout in found else "" for layout in layouts]
                weight = f"`{case.weight}`" if has_weight else ""
                lines.append(f"| {name} | {weight} | {' | '.join(cells)} |")
    return lines


def _cell(result: Result) -> str:
    return f"different ({result.error:.1%})" if result.outcome == DIFFERENT else result.outcome
