"""Reading configurations: which fields the installed release heeds, and which values we can."""

from __future__ import annotations

import inspect
from typing import Any

from smp.nn.output_layer import GELU_ALIASES
from smp.tensor_parallel.registry import Unsupported

_GELUS = {"gelu": "gelu", "gelu_new": "gelu_new", **GELU_ALIASES}
_RELU = {"relu": "relu"}
_SILU = {"silu": "silu", "swish": "silu"}


def declares(config: Any, name: str) -> bool:
    """Whether the class of a configuration knows a field.

    Configurations keep whatever they are given; a field that the class does not know has no effect
    on the models of that release.
    """
    for cls in type(config).__mro__:
        if name in vars(cls).get("__annotations__", {}):
            return True
        init = vars(cls).get("__init__")
        if init is not None and name in inspect.signature(init).parameters:
            return True
    return False


def field(config: Any, name: str, default: Any) -> Any:
    """The value of a field that not all releases have."""
    return getattr(config, name, default) if declares(config, name) else default


def activation_of(config: Any, name: str, *, silu: bool = False) -> str:
    """Our name of an activation.

    Args:
        config: of the model.
        name: of the field.
        silu: whether SiLU is one of those that the family is offered with.

    Raises:
        Unsupported: there is none.
    """
    value = getattr(config, name)
    known = _GELUS | _RELU | (_SILU if silu else {})
    if not isinstance(value, str) or value not in known:
        raise Unsupported(f"{name} is {value!r}; supported are {', '.join(known)}")
    return known[value]


def refuse(config: Any, name: str, default: Any, supported: str) -> None:
    """Declines a field that has another value than its default.

    Raises:
        Unsupported: it has.
    """
    value = getattr(config, name, default)
    if value != default and not (value is None and not default):
        raise Unsupported(f"{name} is {value!r}; supported is {supported}")


def refuse_extra_outputs(config: Any) -> None:
    """Declines configurations that make every call return more than a distributed model has.

    Raises:
        Unsupported: such a one.
    """
    for name in ("output_attentions", "output_hidden_states"):
        refuse(config, name, False, "False, in the configuration as in calls")
