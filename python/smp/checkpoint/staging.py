"""Copies a rank's state to host memory, for a save in the background."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp._device import device_module, is_accelerator

#: Smaller tensors are copied at once: the number of bytes determines the time.
_LATER_BYTES = 64 << 10


@dataclass(frozen=True)
class _Pair:
    source: Tensor
    place: Tensor
    version: int  # version of the source at the time of the call


class LaterCopies:
    """Copies that a thread makes while training goes on.

    Args:
        pairs: pairs whose sources do not change until a caller has waited.
    """

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        self._pairs = list(pairs)
        self._are_over = threading.Event()
        devices = {pair.source.device for pair in pairs if is_accelerator(pair.source.device)}
        # Work that was queued on the caller's streams comes before the copies.
        self._marks = {d: device_module(d).current_stream(d).record_event() for d in devices}
        #: seconds for which callers have waited
        self.waited_s = 0.0

    def make(self) -> None:
        """Makes the copies, in the thread that saves.

        Raises:
            RuntimeError: a source has changed in the meantime.
        """
        try:
            streams = {device: device_module(device).Stream(device) for device in self._marks}
            for device, stream in streams.items():
                stream.wait_event(self._marks[device])
            for pair in self._pairs:
                device = pair.source.device
                with (
                    device_module(device).stream(streams[device])
                    if device in streams
                    else nullcontext()
                ):
                    _C.copy_tensor(pair.place, pair.source)
                if pair.source._version != pair.version:
                    raise RuntimeError(
                        "the optimizer's state was changed while it was copied, but not by a step "
                        "of the optimizer; change it after handle.wait(), or save with "
                        "blocking=True"
                    )
        finally:
            self._pairs = []
            self._are_over.set()

    def wait(self) -> None:
        """Waits until the sources may change."""
        if not self._are_over.is_set():
            begin = time.monotonic()
            self._are_over.wait()
            self.waited_s += time.monotonic() - begin


class Staging:
    """Memory for copies, used again by the next save.

    New memory takes a process several times as long as filling it, and training waits meanwhile.
    One save uses it at a time: `begin` takes back the memory of the save before.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[Any, ...], list[Tensor]] = {}
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}
        self._later: list[_Pair] = []

    def begin(self) -> None:
        """Begins a save, after the one before has ended; memory it did not use is freed."""
        self._free, self._all = self._all, defaultdict(list)
        self._later = []

    def end(self) -> LaterCopies:
        """Frees all memory that this save did not use.

        Returns:
            the copies that are not made yet.
        """
        self._free = {}
        pairs, self._later = self._later, []
        return LaterCopies(pairs)

    def copy(self, value: Any, copies: dict[int, Tensor], *, later: bool = False) -> Any:
        """Returns the same structure with copies of its tensors; one tensor has one copy.

        Args:
            value: dictionaries, lists, tuples, tensors on any device, other values.
            copies: copies by the ids of tensors; this call adds to it.
            later: whether large tensors only get memory, and `LaterCopies` copies them.
        """
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = self._copy(value.detach(), later)
            return copies[id(value)]
        if isinstance(value, dict):
            return {key: self.copy(item, copies, later=later) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.copy(item, copies, later=later) for item in value)
        return value

    def _copy(self, tensor: Tensor, later: bool) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        key = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        free = self._free.get(key)
        place = free.pop() if free else torch.empty_like(tensor, device="cpu")
        self._all[key].append(place)
        if later and tensor.nbytes >= _LATER_BYTES and not tensor.is_inference():
            self._later.append(_Pair(tensor, place, tensor._version))
        else:
            _C.copy_tensor(place, tensor)
        return place
