"""Finds the repeated layers of a model, with the bytes of their inputs and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from smp.partition.costs import Trace


@dataclass(frozen=True)
class Layer:
    """A module that is recomputed as a whole.

    Attributes:
        module: the module.
        input_bytes: bytes of the tensors with gradients that come into it.
        kept_bytes: bytes of activations of all modules in it.
    """

    module: nn.Module
    input_bytes: int
    kept_bytes: int


def repeated_layers(root: nn.Module) -> list[nn.Module]:
    """Returns the elements of lists of modules that are not inside another such element."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(module.children())
        if len(children) < 2 or len({type(child) for child in children}) != 1:
            continue
        if not all(any(True for _ in child.parameters()) for child in children):
            continue
        found += children
        inside.update(below for child in children for below in child.modules())
    return found


def layers_of(trace: Trace, modules: Sequence[nn.Module]) -> list[Layer]:
    """Returns input and activation bytes of modules of a trace."""
    index_of = {module: idx for idx, module in enumerate(trace.modules)}
    result = []
    for module in modules:
        inside = {index_of[below] for below in module.modules()}
        incoming = sum(
            value.num_bytes
            for value in trace.values
            if value.needs_grad and value.producer not in inside and inside & set(value.consumers)
        )
        kept = sum(trace.costs[idx].activation_bytes for idx in inside)
        result.append(Layer(module, incoming, kept))
    return result
