"""Reads attributes and buffers of a module, and detects changes of them."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

# Attributes of a trace, PyTorch and this library that are no state of a module's forward.
_NOT_STATE = frozenset(vars(nn.Module())) | {
    "forward",
    "_flat_weights",
    "_flat_weight_refs",
    "_output_capturing_hooks_installed",
}

#: Entry of `state_of` for an attribute that is not there.
MISSING: tuple[Any, Any] = (object(), None)


class PerMicrobatch(property):
    """A property on a module's class of which each microbatch has a value of its own."""


def is_state(name: str) -> bool:
    """Returns whether an attribute of this name may be state of a forward."""
    return name not in _NOT_STATE and not name.startswith("_smp_")


def state_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns each attribute and buffer, with data by which changes in place are detected."""
    plain = {
        name: (value, _items(value)) for name, value in module.__dict__.items() if is_state(name)
    }
    return plain | {name: (value, _items(value)) for name, value in module._buffers.items()}


def is_same(old: Any, new: Any) -> bool:
    """Returns whether an assigned value is the present one, as far as can be detected."""
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, int | float | str) and old == new


def same_items(old: list[Any] | None, new: list[Any] | None) -> bool:
    """Returns whether two lists have the same objects and the same numbers."""
    if old is None or new is None:
        return old is new
    return len(old) == len(new) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(old, new, strict=True)
    )


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, Tensor):
        return None if value.is_inference() else [value._version]
    return items_of_container(value)


def items_of_container(value: Any) -> list[Any] | None:
    """Returns the contents of a list, dictionary, set or deque; None for other values."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | set | deque) else None
