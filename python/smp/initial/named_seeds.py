"""Random numbers that depend on a seed and a name alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import smp._C as _C


@contextmanager
def random_numbers(device: torch.device, seed: int | None) -> Iterator[Seeds]:
    """Yields seeds by name; generators are restored afterwards, and no gradient is recorded."""
    outside = _C.RandomState.capture(str(device))
    try:
        with torch.no_grad():
            yield Seeds(device, torch.initial_seed() if seed is None else seed)
    finally:
        outside.restore()


class SeededByName(TorchDispatchMode):
    """Makes random numbers drawn into a tensor depend on the tensor's name alone."""

    def __init__(self, names: Mapping[int, str], seeds: Seeds) -> None:
        super().__init__()
        self._names = names
        self._seeds = seeds

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], Tensor):
            if args[0].is_meta and func._schema.name.endswith("_"):
                return args[0]  # draws nothing; PyTorch takes long to find that out
            name = self._names.get(args[0].untyped_storage()._cdata)
            if name is not None:
                # Parts that are drawn one by one must not get the same numbers.
                begin = args[0].storage_offset()
                self._seeds.set(f"{name}[{begin}]" if begin else name)
        return func(*args, **(kwargs or {}))


class Seeds:
    """Random numbers by name.

    Args:
        device: device of this process.
        seed: seed shared by all names.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = str(device)
        self._base = seed & (2**64 - 1)

    def set(self, name: str) -> None:
        """Seeds the generators for a name."""
        digest = hashlib.sha256(name.encode()).digest()
        seed = _C.mix_seed(self._base, int.from_bytes(digest[:8], "little"))
        _C.seed_generators(seed, self._device)
