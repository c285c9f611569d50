"""Defines the result of a probe, and prints it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Section:
    """A subject of the report.

    Attributes:
        name: heading.
        values: texts, numbers, and lists and dicts of them.
        problems: one or two sentences each, with the remedy.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns the section without its name."""
        return {"values": self.values, "problems": self.problems}


def gib(num_bytes: float) -> str:
    """Returns a size such as ``"1.5 GiB"``, in MiB below one GiB."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.0f} MiB"


def print_report(sections: Sequence[Section], as_json: bool) -> None:
    """Prints the sections for programs or for people."""
    if as_json:
        print(json.dumps({section.name: section.to_json() for section in sections}, indent=2))
    else:
        print(to_text(sections))


def to_text(sections: Sequence[Section]) -> str:
    """Returns a block to paste: values and problems by section, and the number of problems."""
    lines = ["smp doctor"]
    for section in sections:
        lines.append(f"\n{section.name}")
        width = max((len(name) for name in section.values), default=0)
        for name, value in section.values.items():
            lines.append(f"  {name:<{width}}  {_words(value)}")
        lines += [f"  ! {problem}" for problem in section.problems]
    count = sum(len(section.problems) for section in sections)
    lines.append(f"\n{count or 'no'} problem{'' if count == 1 else 's'} found")
    return "\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(_words(one) for one in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
