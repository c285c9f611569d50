"""What commands print: tables for people, JSON for programs, and quantities as both write them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from smp.config.schema import to_bytes

_PREFIXES = ("", "k", "M", "G", "T", "P")
_WIDE = 200  # where the output is no terminal: programs that cut lines are worse than long lines


def print_json(facts: Any) -> None:
    """One JSON document on the standard output."""
    print(json.dumps(facts, indent=2))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1
) -> None:
    """A table for people on the standard output.

    Args:
        title: above the table; empty for none.
        columns: their names.
        rows: as many cells each; cells are printed as they are, without markup.
        text_columns: the first so many columns begin at the left, the others end at the right.
    """
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _WIDE
    Console(file=sys.stdout, width=width, markup=False, highlight=False).print(table)


def bytes_text(count: float) -> str:
    """A number of bytes in binary units, with three digits."""
    power = 0
    while abs(count) >= 1000 and power < len(_PREFIXES) - 1:
        count /= 1024
        power += 1
    unit = f"{_PREFIXES[power].upper()}iB" if power else "B"
    return f"{count:.3g} {unit}"


def count_text(count: float) -> str:
    """A large number with three digits: 175 G."""
    power = 0
    while abs(count) >= 1000 and power < len(_PREFIXES) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {_PREFIXES[power]}".strip()


def parse_bytes(text: str) -> int:
    """Bytes of "80GiB" (1024), "80GB" (1000) or "1048576"; a type of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text is no size above 0.
    """
    try:
        return to_bytes(int(text) if text.strip().isdigit() else text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a size like 80GiB, 80GB or a number of bytes expected, got {text!r}"
        ) from None
