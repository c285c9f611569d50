"""Reads, compares and replaces the contents of mutable containers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import CellType
from typing import Any

CONTAINERS = (dict, list, set, deque)


def contents_of(container: Any) -> list[Any]:
    """Returns the items of a container; for dictionaries keys and then values.

    A cell, which holds a variable of a closure, is a container of one item, or of none.
    """
    if isinstance(container, CellType):
        try:
            return [container.cell_contents]
        except ValueError:  # not assigned yet
            return []
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Returns whether two lists of contents have the same objects."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def fill(container: Any, contents: list[Any]) -> None:
    """Replaces the contents of a container; see `contents_of`."""
    if isinstance(container, CellType):
        if contents:
            container.cell_contents = contents[0]
        else:
            del container.cell_contents
        return
    container.clear()
    if isinstance(container, dict):
        half = len(contents) // 2
        container.update(zip(contents[:half], contents[half:], strict=True))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)
