"""What a probe found, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Section:
    """One subject of the report."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    """Texts, numbers, and lists and dicts of them."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, and what to do, one sentence or two each."""

    def to_json(self) -> dict[str, Any]:
        """For `from_json`, without the name."""
        return {"values": self.values, "problems": self.problems}

    @staticmethod
    def from_json(name: str, data: Mapping[str, Any]) -> Section:
        """The inverse of `to_json`."""
        return Section(name, dict(data["values"]), list(data["problems"]))


def gib(num_bytes: float) -> str:
    """``"1.5 GiB"``, or in MiB below one."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.0f} MiB"


def to_text(sections: Sequence[Section]) -> str:
    """A block to paste: values by section, then everything that is wrong."""
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
