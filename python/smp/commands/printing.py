"""Writes and reads quantities for commands, and writes JSON for programs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from smp.config.kinds import to_bytes

_PREFIXES = ("", "k", "M", "G", "T", "P")


def print_json(facts: Any) -> None:
    """Prints one JSON document on the standard output."""
    print(json.dumps(facts, indent=2))


def bytes_text(count: float) -> str:
    """Returns a number of bytes in binary units, with three digits."""
    power = 0
    while abs(count) >= 1000 and power < len(_PREFIXES) - 1:
        count /= 1024
        power += 1
    unit = f"{_PREFIXES[power].upper()}iB" if power else "B"
    return f"{count:.3g} {unit}"


def count_text(count: float) -> str:
    """Returns a large number with three digits, such as ``"175 G"``."""
    power = 0
    while abs(count) >= 1000 and power < len(_PREFIXES) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {_PREFIXES[power]}".strip()


def parse_bytes(text: str) -> int:
    """Parses "80GiB" (1024), "80GB" (1000) or "1048576" into bytes; a type of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text is not a size above 0.
    """
    try:
        return to_bytes(int(text) if text.strip().isdigit() else text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a size like 80GiB, 80GB or a number of bytes expected, got {text!r}"
        ) from None
