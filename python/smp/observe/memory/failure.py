"""Recognises failed allocations, and notes what was in use at that moment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

import smp._C as _C
from smp._device import device_module, is_accelerator

_ON_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough memory).*?(?:allocate (\d+) bytes|$)"
    r"|expected (\d+) bytes of host memory",
    re.DOTALL,
)
_ON_DEVICE = "CUDA out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an allocator of tensors had no memory. Backwards and C++ change the type."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, _C.PeerFailure):
        return False  # its text is that of another rank
    text = str(error)
    return isinstance(error, RuntimeError) and (
        _ON_HOST.search(text) is not None or _ON_DEVICE in text
    )


@dataclass(frozen=True)
class Failure:
    """An allocation that failed, in bytes.

    Attributes:
        asked: bytes that were asked for; 0: not known.
        in_use: bytes of tensors at that moment.
        cached: bytes that the allocator had for later tensors then, or has now on the CPU.
        counted_from: size of the smallest tensor that ``in_use`` counts.
    """

    asked: int
    in_use: int
    cached: int
    counted_from: int = 0


class Failures:
    """Notes what was in use when an allocation failed; an exception frees it on its way.

    Args:
        device: device of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: Failure | None = None
        self._num_failures = _failures()
        if device.type == "cuda":
            torch._C._cuda_attach_out_of_memory_observer(self._note)  # type: ignore[attr-defined]

    def _note(self, device: int, asked: int, in_use: int, free: int) -> None:
        if device == (self._device.index or 0):
            self._noted = self._now(asked)

    def _now(self, asked: int) -> Failure:
        """Returns what the allocator of the accelerator holds now."""
        module = device_module(self._device)
        held = module.memory_allocated(self._device)
        return Failure(asked, held, module.memory_reserved(self._device) - held)

    def failure(self, error: BaseException) -> Failure:
        """Returns the failure of an error for which `is_out_of_memory` holds."""
        if is_accelerator(self._device):
            noted, self._noted = self._noted, None
            return noted or self._now(asked=0)
        stats = _C.host_memory_stats()
        found = _ON_HOST.search(str(error))
        asked = int(next((text for text in found.groups() if text), 0)) if found else 0
        if stats["failures"] > self._num_failures:
            self._num_failures = stats["failures"]
            in_use, asked = stats["live_at_failure_bytes"], stats["failed_bytes"]
        else:
            in_use = stats["live_bytes"]
        return Failure(asked, in_use, stats["cached_bytes"], counted_from=2 << 20)


def _failures() -> int:
    stats: dict[str, Any] = _C.host_memory_stats()
    return int(stats["failures"])
