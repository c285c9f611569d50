"""Copies of a rank's state in host memory, for a save in the background."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class Staging:
    """Memory for copies, used again by the next save.

    To get memory that is new to a process takes several times as long as to fill it, and training
    waits meanwhile. One save at a time: `begin` takes back what the one before it was given.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[Any, ...], list[Tensor]] = {}
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}

    def begin(self) -> None:
        """The save before this one has ended; what it did not need is let go of."""
        self._free, self._all = self._all, defaultdict(list)

    def end(self) -> None:
        """All is copied; nothing more than that is kept."""
        self._free = {}

    def copy(self, value: Any, copies: dict[int, Tensor]) -> Any:
        """The same structure with copies of its tensors; one tensor has one copy.

        Args:
            value: dictionaries, lists, tuples, tensors on any device, anything else.
            copies: by the ids of tensors; is filled.
        """
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = self._copy(value.detach())
            return copies[id(value)]
        if isinstance(value, dict):
            return {key: self.copy(item, copies) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.copy(item, copies) for item in value)
        return value

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        key = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        free = self._free.get(key)
        place = free.pop() if free else torch.empty_like(tensor, device="cpu")
        self._all[key].append(place)
        return place.copy_(tensor)
