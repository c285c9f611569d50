"""Counts what a rank holds, by kind and by module: bytes of storages, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp.modules.packed import parts_of
from smp.precision.holdings import holding_of

KINDS = ("parameters", "gathered units", "gradients", "optimizer state")
_MOST_MODULES = 6


@dataclass
class Held:
    """Bytes of a rank.

    Attributes:
        by_kind: bytes by kind of `KINDS`.
        by_module: the same for groups of modules, by name.
        large_bytes: bytes of storages of at least ``large_from``.
        has_state: whether an optimizer has state already.
    """

    by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    by_module: dict[str, dict[str, int]] = field(default_factory=dict)
    large_bytes: int = 0
    has_state: bool = False

    @property
    def total(self) -> int:
        """Returns the bytes of all kinds."""
        return sum(self.by_kind.values())

    def largest_modules(self) -> list[tuple[str, dict[str, int]]]:
        """Returns the largest groups, largest first."""
        ordered = sorted(self.by_module.items(), key=lambda item: -sum(item[1].values()))
        return ordered[:_MOST_MODULES]


class _Counter:
    def __init__(self, device: torch.device, large_from: int) -> None:
        self.held = Held()
        self._device, self._large_from = device, large_from
        self._seen: set[int] = set()
        self._seen_tensors: set[tuple[int, int]] = set()

    def add(self, kind: str, module: str, tensors: Iterable[Tensor | None]) -> None:
        parts = (part for t in tensors if t is not None for part in parts_of(t).values())
        for tensor in parts:
            if tensor.device.type != self._device.type:
                continue
            try:
                storage = tensor.untyped_storage()
                pointer, num_bytes = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # a placeholder has no memory
            if num_bytes == 0 or pointer == 0:
                continue
            group = self.held.by_module.setdefault(module, dict.fromkeys(KINDS, 0))
            own = tensor.data_ptr(), tensor.numel()
            if own not in self._seen_tensors:  # parts of a bucket belong to several modules
                self._seen_tensors.add(own)
                group[kind] += min(tensor.numel() * tensor.element_size(), num_bytes)
            if pointer in self._seen:
                continue
            self._seen.add(pointer)
            self.held.by_kind[kind] += num_bytes
            if num_bytes >= self._large_from:
                self.held.large_bytes += num_bytes


def held_by(
    models: Iterable[Any], optimizers: Iterable[Any], device: torch.device, large_from: int = 0
) -> Held:
    """Counts what models and optimizers of a rank hold on its device. Not collective.

    Args:
        models: `DistributedModel`s that are partitioned.
        optimizers: `DistributedOptimizer`s.
        device: device of the rank.
        large_from: see `Held.large_bytes`.
    """
    counter = _Counter(device, large_from)
    groups: dict[Tensor, str] = {}
    for model in models:
        names = dict(model.local_named_parameters())
        depth = _depth(names)
        for name, parameter in names.items():
            group = ".".join(name.split(".")[:-1][:depth]) or "(root)"
            holding = holding_of(parameter)
            groups[parameter] = group
            is_sharded = holding is not None and holding.numel < parameter.numel()
            if holding is not None:
                groups[holding.master] = group
                counter.add("parameters", group, [holding.piece])
                counter.add("optimizer state", group, [holding.master])
            counter.add("gathered units" if is_sharded else "parameters", group, [parameter])
        for name, buffer in model.local_named_buffers():
            group = ".".join(name.split(".")[:-1][:depth]) or "(root)"
            counter.add("parameters", group, [buffer])
    for tensor, group in groups.items():
        counter.add("gradients", group, [tensor.grad])
    for optimizer in optimizers:
        for tensor, state in optimizer.optimizer.state.items():
            counter.held.has_state |= bool(state)
            counter.add("optimizer state", groups.get(tensor, "(optimizer)"), _tensors(state))
    return counter.held


def _depth(names: Iterable[str]) -> int:
    """Returns how many parts of a name make a group: enough to separate blocks of a list."""
    for depth in range(1, 5):
        heads = {".".join(name.split(".")[:-1][:depth]) for name in names}
        if len(heads) >= 3:
            return depth
    return 4


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
