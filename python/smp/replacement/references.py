"""Finds what else in a model refers to a module and would go on using the original."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from smp.modules.materialize import memory_span

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = (list, tuple, set, frozenset, deque)
_DEPTH = 5  # levels that are searched below an attribute


class References:
    """Ties of the modules of a model to each other.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        #: by tensor: the modules that hold it or a tensor that overlaps it in memory
        self._holders: dict[Tensor, set[nn.Module]] = {}
        #: by module: the modules that it is registered in
        self._parents: dict[nn.Module, set[nn.Module]] = {}
        #: by module or parameter: attributes that refer to it, with the modules that have them
        self._attributes: dict[Any, list[tuple[nn.Module, str]]] = {}
        modules = list(root.modules())
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._holders.setdefault(tensor, set()).add(module)
            for child in module._modules.values():
                if child is not None:
                    self._parents.setdefault(child, set()).add(module)
        self._join_overlapping()
        self._look_through_attributes(modules)

    def problem_of(self, module: nn.Module) -> str | None:
        """Returns why a module cannot be replaced alone, or None if it can."""
        inside = set(module.modules())
        tensors = (*module.parameters(), *module.buffers())
        if any(not self._holders[tensor] <= inside for tensor in tensors):
            return "it shares parameters or buffers with modules outside of it"
        for name, part in module.named_modules():
            is_free = part is module or not has_tensors(part)
            if not is_free and not self._parents[part] <= inside:
                return f"its part '{name}' is registered outside of it as well"
        referred: list[Any] = [part for part in inside if part is module or has_tensors(part)]
        for one in (*referred, *module.parameters()):
            for holder, attribute in self._attributes.get(one, ()):
                if holder not in inside:
                    return (
                        f"the attribute '{attribute}' of a {type(holder).__name__} refers to it "
                        "beside its registered place, and would go on using the original"
                    )
        return None

    def _join_overlapping(self) -> None:
        """Gives tensors that share memory one set of holders."""
        spans = sorted(
            (*span, idx)
            for idx, tensor in enumerate(self._holders)
            if type(tensor.data) is Tensor and (span := memory_span(tensor)) is not None
        )
        tensors = list(self._holders)
        last_end, joined = 0, None
        for begin, end, idx in spans:
            tensor = tensors[idx]
            if joined is not None and begin < last_end:
                joined |= self._holders[tensor]
                self._holders[tensor] = joined
            else:
                joined = self._holders[tensor]
                last_end = 0
            last_end = max(last_end, end)

    def _look_through_attributes(self, modules: list[nn.Module]) -> None:
        known = set(modules)
        for module in modules:
            for key, value in module.__dict__.items():
                if key in _TABLES or key.startswith("_smp_"):
                    continue
                for found in _found_in(value, known, _DEPTH, set()):
                    self._attributes.setdefault(found, []).append((module, key))


def has_tensors(module: nn.Module) -> bool:
    """Returns whether a module or one of its parts has a parameter or buffer."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _found_in(value: Any, known: set[nn.Module], depth: int, seen: set[int]) -> Iterator[Any]:
    """Yields the modules and parameters that can be reached from a value."""
    if isinstance(value, nn.Module | nn.Parameter):
        if isinstance(value, nn.Parameter) or value in known:
            yield value
            return
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    for inner in _parts_of(value):
        yield from _found_in(inner, known, depth - 1, seen)


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):  # it is not registered anywhere in the model
        yield from (*value._parameters.values(), *value._modules.values())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
    elif not isinstance(value, Tensor | type) and _is_foreign(value):
        yield from list(getattr(value, "__dict__", {}).values())


def _is_foreign(value: Any) -> bool:
    """Returns whether the class of an object is neither Python's own nor PyTorch's."""
    package = type(value).__module__.partition(".")[0]
    return package != "torch" and package not in sys.stdlib_module_names
