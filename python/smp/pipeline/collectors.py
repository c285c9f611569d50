"""Containers in context variables, which code anywhere below a call adds to.

transformers gathers hidden states, attentions and router logits in this way: the model sets a
context variable to a dictionary of lists, and hooks of inner modules append to them. A module on
another rank finds the same containers there. Its additions are added here when it returns.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

import smp._C as _C
from smp.modules import collected

_log = logging.getLogger("smp")

_INSTALLED = "_output_capturing_hooks_installed"  # set by transformers 5 on a model with hooks


@dataclass(frozen=True)
class Addition:
    """The items that were put into one container.

    Attributes:
        path: keys and indices that lead to the container, the location of the variable first.
        items: items appended to a list, or set in a dictionary.
    """

    path: tuple[Any, ...]
    items: list[Any] | dict[Any, Any]


def collectors() -> dict[str, Any]:
    """Returns the containers in context variables now, by location of the variable."""
    return {
        location: value
        for var, value in collected.in_context()
        if (location := _location_of(var)) is not None
    }


def install(outlines: Mapping[str, Any], hooked: Sequence[nn.Module]) -> None:
    """Puts the caller's containers into this context, for the code of the callee.

    Args:
        outlines: outlines of the containers, by location of the variable.
        hooked: models whose outputs the caller captures by hooks.
    """
    for name, value in outlines.items():
        # The variable gets a copy, which is compared later.
        _variable(name).set(collected.outline(value))
    for model in hooked:
        _hook(model)


def additions(before: Mapping[str, Any], module: str) -> list[Addition]:
    """Returns what the callee has added in this context to the containers of `install`.

    Args:
        before: the containers as the caller sent them.
        module: name of the callee.

    Raises:
        RuntimeError: the callee did something else than adding.
    """
    found: list[Addition] = []
    for name, value in before.items():
        try:
            for path, items in collected.added((name,), value, _variable(name).get()):
                found.append(Addition(path, items))
        except collected.Replaced as replaced:
            raise RuntimeError(
                f"{_C.rank_prefix()}module '{module}' replaced or removed what its caller on "
                f"another rank keeps in the context variable '{name}' (at "
                f"{list(replaced.path[1:])}); only additions can be followed. Put the module and "
                "its caller on one partition"
            ) from None
    return found


def add(containers: Mapping[str, Any], found: Sequence[Addition]) -> None:
    """Adds to the caller's containers what the callee has added to its own."""
    for addition in found:
        collected.add(containers[addition.path[0]], addition.path[1:], addition.items)


_variables: dict[str, ContextVar[Any]] = {}
_locations: dict[ContextVar[Any], str | None] = {}


def _variable(location: str) -> ContextVar[Any]:
    """Returns this process's context variable at the location of the caller's."""
    if location not in _variables:
        module, _, path = location.partition(":")
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
        if not isinstance(found, ContextVar):
            raise RuntimeError(
                f"{_C.rank_prefix()}a caller on another rank collects outputs in the context "
                f"variable {location}, which is not a context variable in this process; run the "
                "same code on every rank"
            )
        _variables[location] = found
    return _variables[location]


def _location_of(variable: ContextVar[Any]) -> str | None:
    """Returns module and path by which other processes find a context variable, or None."""
    if variable not in _locations:
        location = _locations[variable] = _find(variable)
        if location is None:
            _log.warning(
                "smp: what modules on other ranks add to the context variable '%s' is not seen "
                "here, because no module has the variable as an attribute",
                variable.name,
            )
    return _locations[variable]


def _find(variable: ContextVar[Any]) -> str | None:
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is variable:
                return f"{module_name}:{name}"
            # The variable may be in an object or a class of a module.
            attributes = getattr(value, "__dict__", None)
            if not isinstance(attributes, Mapping) or isinstance(value, ModuleType):
                continue
            for inner, attribute in list(attributes.items()):
                if attribute is variable:
                    return f"{module_name}:{name}.{inner}"
    return None


def hooked_models(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the outermost models whose outputs transformers captures by hooks."""
    found: list[nn.Module] = []
    below: set[nn.Module] = set()
    for module in modules:  # parents first
        if module.__dict__.get(_INSTALLED) is True and module not in below:
            found.append(module)
            below.update(module.modules())
    return found


def _hook(model: nn.Module) -> None:
    """Installs hooks that capture outputs on a model, once on each of its modules."""
    if model.__dict__.get(_INSTALLED) is True:
        return
    for module in model.modules():  # a part may have been called by itself before
        for key, hook in list(module._forward_hooks.items()):
            if is_capturing(hook):
                del module._forward_hooks[key]
    capturing = sys.modules["transformers.utils.output_capturing"]
    capturing.maybe_install_capturing_hooks(model)


def is_capturing(hook: Any) -> bool:
    """Returns whether transformers captures outputs by a hook."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"
