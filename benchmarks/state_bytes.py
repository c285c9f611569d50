"""Counts a rank's bytes of parameters, gradients and optimizer state: bytes of live storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smp.modules.materialize import is_placeholder
from smp.precision.holdings import holding_of


@dataclass(frozen=True)
class StateBytes:
    """Bytes by kind; each storage counts once, for the first kind in which it is found."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Counts the bytes on this rank.

    Args:
        model: plain, wrapped by PyTorch, or an `smp.DistributedModel`.
        optimizer: `ZeroRedundancyOptimizer` and `smp.DistributedOptimizer` count with the one
            that they wrap.
    """
    inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", optimizer))
    updated = [p for group in inner.param_groups for p in group["params"]]
    parameters = list(model.parameters())
    holdings = [h for h in map(holding_of, parameters) if h is not None]
    pieces = [held for h in holdings for held in (h.piece, h.master)]
    pieces += [p.ds_tensor for p in parameters if isinstance(getattr(p, "ds_tensor", None), Tensor)]
    everything = [*parameters, *pieces, *updated]
    seen: set[int] = set()
    return StateBytes(
        parameters=_new_bytes(everything, seen),
        gradients=_new_bytes((t.grad for t in everything), seen),
        optimizer=_new_bytes(inner.state.values(), seen),
    )


def _new_bytes(values: Iterable[Any], seen: set[int]) -> int:
    """Bytes of storages that were not seen before."""
    total = 0
    for tensor in _tensors(values):
        storage = tensor.untyped_storage()
        # Empty ones have no address.
        if is_placeholder(tensor):
            continue
        if storage.nbytes() > 0 and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)
