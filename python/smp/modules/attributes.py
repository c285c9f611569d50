"""Reads and writes attributes and buffers of a module, and detects changes of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from smp.modules.containers import CONTAINERS, contents_of

# Attributes of a trace, PyTorch and this library that are no state of a module's forward.
_NOT_STATE = frozenset(vars(nn.Module())) | {
    "forward",
    "_flat_weights",
    "_flat_weight_refs",
    "_output_capturing_hooks_installed",
}

#: Value of an attribute that is not there, and its entry in `state_of`.
MISSING: Any = object()
ABSENT: tuple[Any, list[Any] | None] = (MISSING, None)


class PerMicrobatch(property):
    """A property on a module's class of which each microbatch has a value of its own."""


def with_properties(base: type, properties: Mapping[str, property], **methods: Any) -> type:
    """Returns a subclass of a module's class with properties for some attributes.

    Args:
        base: class of a module.
        properties: properties by the name of the attribute.
        methods: further methods.
    """
    # Registries of other libraries find a class by its name.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**properties, **methods, **names})


def inherited(base: type, name: str, module: nn.Module) -> Any:
    """Returns what a property hides: a buffer, or an attribute of the class, of that name."""
    return getattr(base, name) if hasattr(base, name) else nn.Module.__getattr__(module, name)


def _properties_of(module: nn.Module) -> frozenset[str]:
    """Returns names of attributes with a value per microbatch (`smp.pipeline.module_state`)."""
    cls: Any = type(module)
    return _properties_of_class(cls)


@functools.cache
def _properties_of_class(cls: Any) -> frozenset[str]:
    return frozenset(name for name, value in vars(cls).items() if isinstance(value, PerMicrobatch))


def is_state(name: str) -> bool:
    """Returns whether an attribute of this name may be state of a forward."""
    return name not in _NOT_STATE and not name.startswith("_smp_")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns attributes and buffers, including those that are no state."""
    found = {**module.__dict__, **module._buffers}
    for name in _properties_of(module):
        found[name] = getattr(module, name, MISSING)
        if found[name] is MISSING:
            del found[name]
    return found


def get_attribute(module: nn.Module, name: str) -> Any:
    """Returns an attribute or buffer, or MISSING."""
    if name in _properties_of(module):
        return getattr(module, name, MISSING)
    return module._buffers.get(name, module.__dict__.get(name, MISSING))


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Sets an attribute or buffer; MISSING deletes it."""
    if value is MISSING:
        delattr(module, name)
    elif name in module._buffers or name in _properties_of(module):
        setattr(module, name, value)
    else:
        module.__dict__[name] = value


def state_of(module: nn.Module) -> dict[str, tuple[Any, list[Any] | None]]:
    """Returns each attribute and buffer, with data by which changes in place are detected."""
    attributes = attributes_of(module).items()
    return {name: (value, _items(value)) for name, value in attributes if is_state(name)}


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
    return contents_of(value) if isinstance(value, CONTAINERS) else None
