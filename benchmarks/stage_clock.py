"""Measures the time of a microbatch on each rank of a partition, without a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allocation_meter import AllocationMeter
from torch import Tensor, nn


@dataclass(frozen=True)
class StageCosts:
    """Costs of one microbatch, by rank."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kept_bytes: tuple[int, ...]
    """What the forward left for the backward."""
    peak_bytes: tuple[int, ...]
    """The most at any time, with what is needed only for a moment."""


class StageClock:
    """Runs the whole model in one process and charges its time to the ranks that would do it.

    Time passes to another rank where a module of that rank begins, in forward and in backward:
    what is done to a tensor between modules is done where the tensor is.

    Args:
        model: the whole model.
        owner_of: rank by module name.
        num_ranks: number of ranks of the partition.
        meter: counter of the process's bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        owner_of: Mapping[str, int],
        num_ranks: int,
        meter: AllocationMeter,
    ) -> None:
        self._num_ranks = num_ranks
        self._meter = meter
        self._owner = 0
        self._since_s = 0.0
        self._live = 0
        self._spent_s = [0.0] * num_ranks
        self._held = [0] * num_ranks
        self._peak = [0] * num_ranks
        for module, owner in _whole_modules(model, "", owner_of):
            enter = self._enter_on(owner)
            module.register_forward_pre_hook(enter)
            module.register_full_backward_pre_hook(enter)

    def run(self, run_forward: Callable[[], Tensor]) -> StageCosts:
        """Measures one microbatch."""
        self._owner = 0
        self._held, self._peak = [0] * self._num_ranks, [0] * self._num_ranks
        self._since_s, self._live = time.perf_counter(), self._meter.restart()
        loss = run_forward()
        forward_s = self._lap()
        kept_bytes = tuple(self._held)
        loss.backward()
        return StageCosts(forward_s, self._lap(), kept_bytes, tuple(self._peak))

    def _enter_on(self, owner: int) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._switch(owner)

        return enter

    def _switch(self, owner: int) -> None:
        now_s, was = time.perf_counter(), self._owner
        self._spent_s[was] += now_s - self._since_s
        top = self._held[was] + self._meter.peak() - self._live
        self._peak[was] = max(self._peak[was], top)
        live = self._meter.restart()
        self._held[was] += live - self._live
        self._owner, self._since_s, self._live = owner, now_s, live

    def _lap(self) -> tuple[float, ...]:
        self._switch(self._owner)
        result, self._spent_s = tuple(self._spent_s), [0.0] * self._num_ranks
        return result


def _whole_modules(
    module: nn.Module, name: str, owner_of: Mapping[str, int]
) -> list[tuple[nn.Module, int]]:
    """The largest modules that are on one rank with all that is in them, and that are called."""
    prefix = f"{name}." if name else ""
    owners = {
        owner for other, owner in owner_of.items() if other == name or other.startswith(prefix)
    }
    if len(owners) == 1 and not isinstance(module, nn.ModuleList):
        return [(module, owners.pop())]
    return [
        found
        for child_name, child in module.named_children()
        for found in _whole_modules(child, prefix + child_name, owner_of)
    ]
