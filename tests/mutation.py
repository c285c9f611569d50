"""Faults that tools put into copies of sources, each behind a switch of its own."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: texts of one file and their replacements, in which ``@`` is the switch.

    Attributes:
        is_found: whether the tests find it. ``why_not`` has the reason if they do not.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    is_found: bool = True
    why_not: str = ""


def without(statement: str) -> tuple[str, str]:
    """Returns the change that leaves a statement of C++ out."""
    return statement, f"if (!@) {statement}"


def mutate(source: str, mutation: Mutation, switch: str) -> str | None:
    """Returns the source with the mutation behind its switch; None: it does not fit any more."""
    for text, replacement in mutation.changes:
        if source.count(text) != 1:
            return None
        source = source.replace(text, replacement.replace("@", switch))
    return source
