"""Leaves a model as it was: undoes all that a trace does to modules, buffers and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def untouched(modules: Sequence[nn.Module], keep_values: bool) -> Iterator[None]:
    """Restores the attributes of all modules on exit.

    Whatever a forward assigns to ``self``, parameters and buffers that were exchanged, and
    replaced ``forward`` are as before.

    Args:
        modules: all modules of the model.
        keep_values: also restore the values of buffers, which a real forward may write in place.
    """
    attributes = [_copy_of(module) for module in modules]
    buffers = {
        id(buffer): (buffer, buffer.detach().clone())
        for module in modules
        for buffer in (module._buffers.values() if keep_values else ())
        if buffer is not None and not buffer.is_meta
    }
    try:
        yield
    finally:
        for module, (plain, tables) in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(plain)
            for name, entries in tables.items():
                table = plain[name]
                table.clear()
                table.update(entries)
        with torch.no_grad():
            for buffer, value in buffers.values():
                buffer.copy_(value)


_TABLES = ("_parameters", "_buffers", "_modules")


def _copy_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    plain = dict(module.__dict__)
    return plain, {name: dict(plain[name]) for name in _TABLES}


def exchange_tensors(modules: Sequence[nn.Module], replacement: Callable[[Tensor], Tensor]) -> None:
    """Puts other tensors in the place of all parameters and buffers, ties preserved.

    Args:
        modules: all modules of the model, inside of `untouched`.
        replacement: called once per distinct tensor.
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
            # Its forward reads this list instead of its parameters.
            module.__dict__["_flat_weights"] = [
                exchanged(weight) if isinstance(weight, Tensor) else weight
                for weight in module._flat_weights
            ]
