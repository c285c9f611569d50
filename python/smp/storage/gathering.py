"""Makes sharded parameters whole where code reads them: around forwards, and on access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import smp._C as _C
from smp.modules.flat import tensors_in
from smp.modules.forwards import Forward, WrapperKind, wrap_forward
from smp.modules.late import LateTensor
from smp.storage.units import UnitPlan
from smp.storage.watched import watch_parameters


def install(store: _C.ParameterStore, plan: UnitPlan, root: nn.Module) -> list[Callable[[], None]]:
    """Lets modules gather their parameters.

    Args:
        store: store with the units of ``plan``, in their order.
        plan: units of ``root``.

    Returns:
        functions that undo it.
    """
    undo = [
        wrap_forward(module, WrapperKind.PARAMETERS, _around(store, list(units)))
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
            # Code that lists parameters rarely reads them, and all at once may take too much
            # memory.
            undo.append(watch_parameters(module, units, store.read, on_listing=False))
    return undo


def _around(store: _C.ParameterStore, units: list[int]) -> Callable[[Forward], Forward]:
    def wrapper(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            scope = store.enter(units)
            results: list[Tensor] = []
            try:
                output = forward(*args, **kwargs)
                found = tensors_in(output)
                results = [x.source if isinstance(x, LateTensor) else x for x in found]
            finally:
                scope.leave(results)
            return output

        return run

    return wrapper
