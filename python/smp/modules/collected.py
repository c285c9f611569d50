"""Finds what code below a call adds to containers in context variables.

Transformers collects hidden states, attentions and router logits in such containers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_LEAVES = (Tensor, bool, int, float, type(None))
_OF_TRANSFORMERS = "output_collector"  # empty if no outputs are to be collected


@dataclass(frozen=True)
class Placeholder:
    """A mark for an object in a caller's container, which the callee need not have."""

    position: int


class Replaced(Exception):
    """A container was changed other than by an addition; ``path`` leads to it."""

    def __init__(self, path: tuple[Any, ...]) -> None:
        super().__init__(str(path))
        self.path = path


#: Keys and indices that lead to a container, and what was appended to it, or set in it.
Added = tuple[tuple[Any, ...], list[Any] | dict[Any, Any]]


def in_context() -> Iterator[tuple[ContextVar[Any], Any]]:
    """Yields context variables with containers, and the containers."""
    for var, value in copy_context().items():
        if (
            isinstance(value, dict | list)
            and (value or var.name != _OF_TRANSFORMERS)
            and not var.name.startswith("smp_")
            and _collects(value)
        ):
            yield var, value


def _collects(value: Any) -> bool:
    """Returns whether a value is a container of tensors and containers, not of texts."""
    if isinstance(value, dict):
        return all(_collects(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_collects(item) for item in value)
    return isinstance(value, (*_LEAVES, Placeholder))


def outline(value: Any, count: list[int] | None = None) -> Any:
    """Returns the same containers with placeholders for the tensors in them."""
    count = [0] if count is None else count
    if isinstance(value, dict):
        return {key: outline(item, count) for key, item in value.items()}
    if isinstance(value, list):
        return [outline(item, count) for item in value]
    if isinstance(value, Placeholder):
        return value
    if isinstance(value, tuple | Tensor):
        count[0] += 1
        return Placeholder(count[0] - 1)
    return value


def added(path: tuple[Any, ...], before: Any, after: Any) -> Iterator[Added]:
    """Yields what was added to containers.

    Args:
        path: keys and indices that lead to the containers.
        before: outline of the containers.
        after: the containers now.

    Raises:
        Replaced: they were changed other than by additions.
    """
    if isinstance(before, list) and isinstance(after, list) and len(after) >= len(before):
        if len(after) > len(before):
            yield path, list(after[len(before) :])
        for i, item in enumerate(before):
            yield from added((*path, i), item, after[i])
    elif isinstance(before, dict) and isinstance(after, dict) and before.keys() <= after.keys():
        new = {key: item for key, item in after.items() if key not in before}
        if new:
            yield path, new
        for key, item in before.items():
            yield from added((*path, key), item, after[key])
    elif isinstance(after, Tensor) or before != after:
        raise Replaced(path)


def add(container: Any, path: tuple[Any, ...], items: list[Any] | dict[Any, Any]) -> None:
    """Adds to a container what was added to its outline."""
    for key in path:
        container = container[key]
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)
