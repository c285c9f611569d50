"""Makes sharded parameters whole where code reads them: around forwards, and on access."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from smp import _C
from smp.data_parallel.units import UnitPlan
from smp.forwards import Around, Forward, wrap_forward


def install(store: _C.ParameterStore, plan: UnitPlan, root: nn.Module) -> list[Callable[[], None]]:
    """Lets modules gather what they need.

    Args:
        store: of the units of ``plan``, in their order.
        plan: of ``root``.

    Returns:
        functions that undo it.
    """
    undo = [
        wrap_forward(module, Around.PARAMETERS, _around(store, list(units)))
        for module, units in plan.needs.items()
    ]
    unit_of = {p: index for index, unit in enumerate(plan.units) for p in unit.parameters}
    for module in root.modules():
        units = {
            name: unit_of[parameter]
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in unit_of
        }
        if units:
            undo.append(_watch(module, store, units))
    return undo


def _around(store: _C.ParameterStore, units: list[int]) -> Callable[[Forward], Forward]:
    def wrapper(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            scope = store.enter(units)
            results: list[Tensor] = []
            try:
                output = forward(*args, **kwargs)
                results = tensors_in(output)
            finally:
                scope.leave(results)
            return output

        return run

    return wrapper


class _Watched(dict[str, Any]):
    """The parameters of a module, which are gathered when somebody reads one by its name.

    That is how code gets at a parameter outside of the forward of its unit: a parent that reads
    its child's, a head that uses the table of an embedding.

    Source: the idea is DeepSpeed's (ZeRO stage 3).
    """

    def __init__(
        self, parameters: dict[str, Any], read: Callable[[int], None], units: Mapping[str, int]
    ) -> None:
        super().__init__(parameters)
        self._read = read
        self._units = units

    def __getitem__(self, name: str) -> Any:
        unit = self._units.get(name)
        if unit is not None:
            self._read(unit)
        return super().__getitem__(name)

    def __reduce__(self) -> Any:
        """Copies and pickles are of a plain module."""
        return dict, (dict(self.items()),)


def _watch(
    module: nn.Module, store: _C.ParameterStore, units: Mapping[str, int]
) -> Callable[[], None]:
    watched = _Watched(module._parameters, store.read, units)
    module.__dict__["_parameters"] = watched

    def undo() -> None:
        if module.__dict__["_parameters"] is watched:
            module.__dict__["_parameters"] = dict(watched.items())

    return undo


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in the result of a module: in containers, and in the fields of dataclasses."""
    found: list[Tensor] = []
    _collect(value, found)
    if not found and hasattr(value, "__dict__"):
        _collect(vars(value), found)  # an object that nobody knows
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, Sequence | set | frozenset):
        if not isinstance(value, str | bytes):
            for item in value:
                _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), found)
