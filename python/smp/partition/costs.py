"""The results of a trace: costs of modules, and tensors between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from smp.modules.module_writes import ModuleWrites

# Words for how the code of a module uses parameters of others; the names of these follow.
READS = "reads parameters of"
TRANSFORMS = "calls inside of a transform of torch.func"
DIFFERENTIATES = "differentiates inside of its forward (torch.autograd.grad)"
OWN_BACKWARD = "calls inside of an autograd function with a backward of its own"


@dataclass(frozen=True)
class ModuleCost:
    """The own costs of a module, without its children, over all its calls in one microbatch.

    Attributes:
        num_calls: number of calls; 0 for a module that was never called.
        forward_flops, backward_flops: FLOPs by shapes, with memory traffic, see `trace_flops`.
        time_ms: time of the forward, if measured.
        activation_bytes: bytes kept for backward, without parameters and buffers.
        data_dependent: whether it read a value of a tensor into Python.
    """

    num_calls: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    time_ms: float | None = None
    activation_bytes: int = 0
    data_dependent: bool = False

    @property
    def compute(self) -> float:
        """Returns forward and backward cost: milliseconds if times were measured, else FLOPs."""
        flops = self.forward_flops + self.backward_flops
        if self.time_ms is None:
            return flops
        # Only forwards are measured; the ratio of FLOPs is better than a constant.
        return self.time_ms * (flops / self.forward_flops if self.forward_flops else 1.0)

    @property
    def forward_compute(self) -> float:
        """Returns the part of `compute` in forwards."""
        return self.forward_flops if self.time_ms is None else min(self.time_ms, self.compute)


@dataclass(frozen=True)
class TracedValue:
    """A tensor that own code of one module made and own code of others reads.

    Attributes:
        producer: index of the module.
        num_bytes: bytes of the tensor.
        consumers: indices of the modules that read it.
        needs_grad: whether a gradient comes back.
        sources: values that it is made of, if the engine leaves the operator to the rank with the
            data; it is made on the rank of the last one.
        flops: forward and backward cost of making it, if it has sources; part of its producer's.
        activation_bytes: bytes kept for its backward; part of its producer's.
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
    """A record of one forward of a model. Modules are named by their index in ``modules``.

    Attributes:
        modules: the distinct modules, in the order of ``root.modules()``.
        costs: costs per module.
        order: modules in the order of their first call.
        values: tensors in the order in which they were made.
        calls: (caller, called) pairs.
        parameter_reads: one of the words above by (module, holder): own code of the module uses a
            parameter of the holder that it was not given, so both must be on one rank.
        writes: writes of the forward to attributes of modules.
        how: "fake", or the type of the device that the model really ran on.
        unit: unit of `ModuleCost.compute`: "flops" or "ms".
        cost_per_link_byte: cost of sending one byte to another rank, in this unit.
        casts: parameters to which the forward gave another dtype for good, as (module, parameter
            name, dtype).
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
        """Returns the own costs of a module.

        Raises:
            KeyError: the module is not part of the model.
        """
        for other, cost in zip(self.modules, self.costs, strict=True):
            if other is module:
                return cost
        raise KeyError(type(module).__name__)
