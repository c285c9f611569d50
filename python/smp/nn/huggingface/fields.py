"""Readers of configurations: fields that the installed release uses and values that we support."""

from __future__ import annotations

import inspect
from typing import Any

from smp.nn.output_layer import GELU_ALIASES
from smp.tensor_parallel.registry import Unsupported

_GELUS = {"gelu": "gelu", "gelu_new": "gelu_new", **GELU_ALIASES}
_RELU = {"relu": "relu"}


def declares(config: Any, name: str) -> bool:
    """Returns whether the class of a configuration declares a field.

    Configurations keep all fields that they are given; a field that the class does not declare has
    no effect on the models of that release.
    """
    for cls in type(config).__mro__:
        if name in vars(cls).get("__annotations__", {}):
            return True
        init = vars(cls).get("__init__")
        if init is not None and name in inspect.signature(init).parameters:
            return True
    return False


def field(config: Any, name: str, default: Any) -> Any:
    """Returns the value of a field that not all releases have."""
    return getattr(config, name, default) if declares(config, name) else default


def activation_of(config: Any, name: str) -> str:
    """Returns our name of an activation.

    Args:
        config: configuration of the model.
        name: name of the field.

    Raises:
        Unsupported: we have no such activation.
    """
    value = getattr(config, name)
    known = _GELUS | _RELU
    if not isinstance(value, str) or value not in known:
        raise Unsupported(f"{name} is {value!r}; supported are {', '.join(known)}")
    return known[value]


def refuse(config: Any, name: str, default: Any, supported: str) -> None:
    """Declines a field that differs from its default.

    Raises:
        Unsupported: the field differs.
    """
    value = getattr(config, name, default)
    if value != default and not (value is None and not default):
        raise Unsupported(f"{name} is {value!r}; supported is {supported}")


def refuse_extra_outputs(config: Any) -> None:
    """Declines configurations by which every call returns more than a distributed model can.

    Raises:
        Unsupported: the configuration asks for attentions or hidden states.
    """
    for name in ("output_attentions", "output_hidden_states"):
        refuse(config, name, False, "False, in the configuration as in calls")
