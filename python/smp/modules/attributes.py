"""What a module keeps in attributes and buffers, and whether that is what it was before."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

# What a trace, PyTorch and this library keep in a module; no state of its forward.
_NOT_STATE = frozenset(vars(nn.Module())) | {
    "forward",
    "_flat_weights",
    "_flat_weight_refs",
    "_output_capturing_hooks_installed",
}

#: In place of what `state_of` has for an attribute that is not there.
MISSING: tuple[Any, Any] = (object(), None)


class PerMicrobatch(property):
    """An attribute of which each microbatch has a value of its own, on the class of its module."""


def is_state(name: str) -> bool:
    """May an attribute be state of a forward, by its name?"""
    return name not in _NOT_STATE and not name.startswith("_smp_")


def state_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Value of each attribute and buffer, and what tells whether it was changed in place."""
    plain = {
        name: (value, _items(value)) for name, value in module.__dict__.items() if is_state(name)
    }
    return plain | {name: (value, _items(value)) for name, value in module._buffers.items()}


def is_same(old: Any, new: Any) -> bool:
    """Is a value that is assigned the one that is there, as far as anybody can tell?"""
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, int | float | str) and old == new


def same_items(old: list[Any] | None, new: list[Any] | None) -> bool:
    """Are there the same objects, and the same numbers, as before?"""
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
    """What is in a list, dictionary, set or deque; None: it is no such container."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | set | deque) else None
