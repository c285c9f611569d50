"""Checkpoints as few layers as a memory budget allows.

In the first step all layers of a sequence are checkpointed, and their second runs are measured:
bytes that autograd saves besides parameters and arguments, and floating-point operations. Both
follow from shapes alone, so ranks that have to recompute alike, because their layers contain
collectives, decide alike. Microbatches under way at once are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import smp._C as _C
from smp.activations.recompute import is_recomputing, recompute
from smp.modules.flat import tensors_in
from smp.modules.forwards import Forward
from smp.modules.materialize import is_placeholder
from smp.partition.trace_flops import flops_per_byte, operator_cost


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer on a rank.

    Attributes:
        kept_bytes: bytes kept until backward, per microbatch, without checkpointing.
        argument_bytes: the part of these bytes that is kept with checkpointing, too.
        flops: floating-point operations of a forward.
        num_kept: microbatches whose activations are kept at once.
    """

    kept_bytes: int
    argument_bytes: int
    flops: float
    num_kept: int = 1


# Bytes are counted in this many parts of the savings from checkpointing all layers.
_RESOLUTION = 4096


def plan_budget(layers: Sequence[LayerCost], budget_bytes: int) -> list[bool]:
    """Chooses layers to compute again, so that the rest fits and the least work is done twice.

    Solves a knapsack by dynamic programming, exact up to rounding of bytes to a 4096th, towards the
    safe side. Memory of a checkpointed layer during its second run counts, too.

    Args:
        layers: costs of the layers, in any order.
        budget_bytes: memory for the activations of all layers and all microbatches under way.

    Returns:
        True for each layer that is checkpointed; all True if nothing fits.
    """
    if not layers:
        return []
    whole = sum(layer.kept_bytes * layer.num_kept for layer in layers)
    if whole <= budget_bytes:
        return [False] * len(layers)
    again = max(layer.kept_bytes for layer in layers)
    must_save = whole + again - budget_bytes
    savings = [max(0, layer.kept_bytes - layer.argument_bytes) * layer.num_kept for layer in layers]
    if sum(savings) < must_save:
        return [True] * len(layers)
    unit = max(1, -(-sum(savings) // _RESOLUTION))
    wanted = -(-must_save // unit)
    # Least work, and the layers that do it, by units saved.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for idx, (layer, saving) in enumerate(zip(layers, savings, strict=True)):
        for saved, (flops, chosen) in sorted(best.items(), reverse=True):
            reached = min(wanted, saved + saving // unit)
            option = (flops + layer.flops * layer.num_kept, (*chosen, idx))
            if reached > saved and (reached not in best or option < best[reached]):
                best[reached] = option
    if wanted not in best:  # rounding only can cause this
        return [True] * len(layers)
    picked = set(best[wanted][1])
    return [idx in picked for idx in range(len(layers))]


class _Layer:
    """The measurements of one layer on this rank, and the decision about it."""

    def __init__(self) -> None:
        self.cost: LayerCost | None = None
        self.num_live = 0
        self.most_live = 0
        self.checkpoints = True


class Budget:
    """Measures one sequence on this rank, and decides which of its layers are checkpointed.

    Args:
        budget_bytes: memory for the activations of the layers that run here.
        preserve_rng_state: see `smp.activations.recompute`.
    """

    def __init__(self, budget_bytes: int, preserve_rng_state: bool) -> None:
        self._budget_bytes = budget_bytes
        self._preserve_rng_state = preserve_rng_state
        self._layers: dict[nn.Module, _Layer] = {}
        self._measured_step: int | None = None
        self.decided = False

    @property
    def checkpoints(self) -> list[bool]:
        """Returns whether each layer that runs here is checkpointed."""
        return [layer.checkpoints for layer in self._layers.values()]

    @property
    def costs(self) -> list[LayerCost | None]:
        """Returns measured costs of the layers that run here; None before the measurement."""
        return [layer.cost for layer in self._layers.values()]

    def around(self, module: nn.Module, inner: Forward) -> Forward:
        """Returns the forward of a layer for `smp.modules.forwards.wrap_forward`."""
        layer = self._layers.setdefault(module, _Layer())

        def measured(*args: Any, **kwargs: Any) -> Any:
            if not is_recomputing():
                return inner(*args, **kwargs)
            layer.num_live -= 1
            if layer.cost is not None:
                return inner(*args, **kwargs)
            result, cost = measure(module, inner, args, kwargs)
            layer.cost = cost
            return result

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            if not self.decided:
                self._decide_if_measured()
            if self.decided and not layer.checkpoints:
                return inner(*args, **kwargs)
            layer.num_live += 1
            layer.most_live = max(layer.most_live, layer.num_live)
            return recompute(
                inner if self.decided else measured,
                args,
                kwargs,
                preserve_rng_state=self._preserve_rng_state,
                modules=(module,),
            )

        return forward

    def _decide_if_measured(self) -> None:
        """Decides in the first step after all layers that run here were measured."""
        step = _C.current_step()
        if self._measured_step is None:
            self._measured_step = step
        used = [layer for layer in self._layers.values() if layer.most_live > 0]
        is_over = step != self._measured_step or (step < 0 and all(x.num_live == 0 for x in used))
        if not used or not is_over or any(layer.cost is None for layer in used):
            return
        costs = []
        for layer in used:
            assert layer.cost is not None
            known = layer.cost
            costs.append(
                LayerCost(known.kept_bytes, known.argument_bytes, known.flops, layer.most_live)
            )
        for layer, checkpoints in zip(used, plan_budget(costs, self._budget_bytes), strict=True):
            layer.checkpoints = checkpoints
        self.decided = True


def measure(module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> tuple[Any, LayerCost]:
    """Runs a forward with gradients and measures the bytes it keeps and the work it does.

    Args:
        module: module whose parameters and buffers, gathered ones included, are not counted.
        forward: forward of the module.
        args, kwargs: arguments of the call; their tensors are counted apart.
    """
    own = (*module.parameters(), *module.buffers())

    def is_own(address: int) -> bool:
        # Looked up each time: sharded parameters are gathered when their layer runs.
        here = (tensor for tensor in own if not is_placeholder(tensor))
        return any(tensor.untyped_storage().data_ptr() == address for tensor in here)

    # Addresses of storages, all of which live as long as the result.
    known: set[int] = set()
    arguments = kept = 0
    for tensor in tensors_in((args, kwargs)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and not is_own(storage.data_ptr()):
            known.add(storage.data_ptr())
            arguments += storage.nbytes()

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and not is_own(storage.data_ptr()):
            kept += storage.nbytes()
            known.add(storage.data_ptr())
        # Not the tensor itself: a saved result would keep its own node alive.
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor), _Work() as work:
        result = forward(*args, **kwargs)
    return result, LayerCost(arguments + kept, arguments, work.flops)


class _Work(TorchDispatchMode):
    """Adds up the floating-point operations of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = (
            [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            for value in ((args, kwargs), result)
        )
        device_type = outputs[0].device.type if outputs else "cpu"
        cost = operator_cost(
            func, args, kwargs, result, inputs, outputs, (), flops_per_byte(device_type)
        )
        self.flops += cost[0]
        return result
