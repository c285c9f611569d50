"""What a trace has found out about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from smp.modules.module_writes import ModuleWrites

# How the code of a module uses parameters of others: verbs in front of their names.
READS = "reads parameters of"
TRANSFORMS = "calls inside of a transform of torch.func"
DIFFERENTIATES = "differentiates inside of its forward (torch.autograd.grad)"
OWN_BACKWARD = "calls inside of an autograd function with a backward of its own"


@dataclass(frozen=True)
class ModuleCost:
    """Own costs of a module, without its children, over all its calls in one microbatch.

    Attributes:
        num_calls: 0 for a module that was never called.
        forward_flops, backward_flops: from shapes; memory traffic counts as well, see
            `trace_flops`.
        time_ms: of the forward, if measured.
        activation_bytes: kept for backward, parameters and buffers apart.
        data_dependent: it read a value of a tensor into Python.
    """

    num_calls: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    time_ms: float | None = None
    activation_bytes: int = 0
    data_dependent: bool = False

    @property
    def compute(self) -> float:
        """Forward and backward, in milliseconds if times were measured, else in FLOPs."""
        flops = self.forward_flops + self.backward_flops
        if self.time_ms is None:
            return flops
        # Only forwards are measured; what FLOPs say about the backward is better than a constant.
        return self.time_ms * (flops / self.forward_flops if self.forward_flops else 1.0)

    @property
    def forward_compute(self) -> float:
        """The part of `compute` in forwards."""
        return self.forward_flops if self.time_ms is None else min(self.time_ms, self.compute)


@dataclass(frozen=True)
class TracedValue:
    """A tensor that own code of one module made and that of others read.

    Attributes:
        producer: index of the module.
        num_bytes: of the tensor.
        consumers: indices of the modules that read it.
        needs_grad: whether a gradient comes back.
        sources: for what the engine leaves where the data are: the values it is made of. It is
            made where the last one is.
        flops: forward and backward of making it, if it has sources; part of its producer's.
        activation_bytes: kept for that; part of its producer's.
    """

    producer: int
    num_bytes: int
    consumers: tuple[int, ...]
    needs_grad: bool
    sources: tuple[int, ...] = ()
    flops: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True)
class Trace:
    """One forward of a model. Modules are named by their index in ``modules``.

    Attributes:
        modules: the distinct modules, in the order of ``root.modules()``.
        costs: per module.
        order: modules in the order of their first call.
        values: tensors in the order in which they were made.
        calls: (caller, called) pairs.
        parameter_reads: (module, holder): its own code uses a parameter of another module that
            it was not given, so both must be on one rank; with what the code does, one of the
            verbs above.
        writes: what the forward wrote to attributes of modules.
        how: "fake", or the type of the device that the model really ran on.
        unit: of `ModuleCost.compute`: "flops" or "ms".
        cost_per_link_byte: what a byte to another rank costs in this unit.
        casts: parameters to which the forward gave another dtype for good, with that: module, name
            in it, dtype.
    """

    modules: tuple[nn.Module, ...]
    costs: tuple[ModuleCost, ...]
    order: tuple[int, ...]
    values: tuple[TracedValue, ...]
    calls: frozenset[tuple[int, int]]
    parameter_reads: Mapping[tuple[int, int], str]
    how: str
    unit: str
    cost_per_link_byte: float
    writes: ModuleWrites = ModuleWrites()
    casts: tuple[tuple[int, str, torch.dtype], ...] = ()

    def cost_of(self, module: nn.Module) -> ModuleCost:
        """Own costs of a module.

        Raises:
            KeyError: it is not part of the model.
        """
        for other, cost in zip(self.modules, self.costs, strict=True):
            if other is module:
                return cost
        raise KeyError(type(module).__name__)
