"""Measures time and memory of the own code of modules in a real forward."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

Forward = Callable[..., Any]


class Stopwatch:
    """A meter for the own time of every module in one forward.

    Args:
        num_modules: number of modules.
        device: device that is synchronized before the clock is read.
    """

    def __init__(self, num_modules: int, device: torch.device) -> None:
        self.own_ms = [0.0] * num_modules
        self._device = device
        self._below_ms: list[float] = []

    def _now_ms(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return 1e3 * time.perf_counter()

    def wrap(self, idx: int, forward: Forward) -> Forward:
        """Returns ``forward`` of module ``idx`` with its time taken."""

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._now_ms()
            self._below_ms.append(0.0)
            try:
                return forward(*args, **kwargs)
            finally:
                total = self._now_ms() - started
                self.own_ms[idx] += total - self._below_ms.pop()
                if self._below_ms:
                    self._below_ms[-1] += total

        return timed


class MemoryGauge:
    """A meter for the bytes that own code of every module leaves allocated on a CUDA device.

    Args:
        num_modules: number of modules.
        device: a CUDA device.
    """

    def __init__(self, num_modules: int, device: torch.device) -> None:
        self.own_bytes = [0] * num_modules
        self._device = device
        self._below: list[int] = []

    def wrap(self, idx: int, forward: Forward) -> Forward:
        """Returns ``forward`` of module ``idx`` with the bytes that it leaves behind counted."""

        @functools.wraps(forward)
        def gauged(*args: Any, **kwargs: Any) -> Any:
            before = torch.cuda.memory_allocated(self._device)
            self._below.append(0)
            result = forward(*args, **kwargs)
            total = torch.cuda.memory_allocated(self._device) - before
            self.own_bytes[idx] += max(0, total - self._below.pop())
            if self._below:
                self._below[-1] += total
            return result

        return gauged
