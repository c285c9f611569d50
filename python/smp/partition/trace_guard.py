"""Leaves a model as it was: undoes all that a trace does to modules, buffers and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from smp.modules.tables import use_plain
from smp.partition.containers import Containers, reachable_from_hook
from smp.partition.trace_state import KeptData


@contextmanager
def untouched(modules: Sequence[nn.Module], keep_values: bool) -> Iterator[None]:
    """Restores the attributes of all modules on exit.

    Everything that a forward assigns to ``self``, parameters and buffers that were exchanged, hooks
    that were registered, and replaced ``forward`` are as before. So are the contents of containers
    and the attributes of plain objects that modules hold or that their hooks write to (closures and
    globals).

    Args:
        modules: all modules of the model.
        keep_values: whether to restore also the values of buffers and of tensors that are
            attributes, which a real forward may write in place.
    """
    attributes = [dict(module.__dict__) for module in modules]
    containers = Containers(objects=True)
    for module in modules:
        containers.add(module.__dict__.values())
        for hook in hooks_of(module):
            containers.add(reachable_from_hook(hook))
    data = KeptData(modules)
    buffers = {
        id(buffer): (buffer, buffer.detach().clone())
        for module in modules
        for buffer in (
            (*module._buffers.values(), *module.__dict__.values()) if keep_values else ()
        )
        if isinstance(buffer, Tensor) and not buffer.is_meta and not buffer.requires_grad
    }
    for module in modules:
        use_plain(module)  # what a trace exchanges is no microbatch's replacement
    try:
        yield
    finally:
        for module, plain in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(plain)
        containers.restore()
        data.restore()
        with torch.no_grad():
            for buffer, value in buffers.values():
                buffer.copy_(value)


#: Tables of modules with hooks around their forward and backward.
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES_OF_ALL = tuple(f"_global{table}" for table in HOOK_TABLES)


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Returns all hooks around the forward and backward of a module."""
    return [hook for table in HOOK_TABLES for hook in getattr(module, table, {}).values()]


def exchange_tensors(modules: Sequence[nn.Module], replacement: Callable[[Tensor], Tensor]) -> None:
    """Replaces all parameters and buffers by other tensors, ties preserved.

    Args:
        modules: all modules of the model, inside of `untouched`.
        replacement: function that returns a new tensor; called once per distinct tensor.
    """
    made: dict[Tensor, Tensor] = {}

    def exchanged(tensor: Tensor) -> Tensor:
        if tensor not in made:
            made[tensor] = replacement(tensor)
        return made[tensor]

    for module in modules:
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = exchanged(tensor)  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):
            # The forward reads this list instead of the parameters.
            module.__dict__["_flat_weights"] = [
                exchanged(weight) if isinstance(weight, Tensor) else weight
                for weight in module._flat_weights
            ]


@contextmanager
def without_hooks_on_all_modules() -> Iterator[None]:
    """Hides the hooks that are registered for all modules, during a run that no script asked for.

    They belong to the script, which counts or times its own calls. A trace is none of these calls,
    has no values, and may end inside of a call.
    """
    tables = [getattr(module_hooks, name) for name in _TABLES_OF_ALL]
    hidden = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, hidden, strict=True):
            hooks.update(table)  # hooks registered meanwhile come last
            table.clear()
            table.update(hooks)
