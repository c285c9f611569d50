"""The device that a part measures: a GPU, or the CPU for a dry run of the same script."""

from __future__ import annotations

import functools
import gc
import statistics
import time
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

#: A device before a process has reached it.
UNNAMED = "a GPU"
#: Dense bf16 operations per second by NVIDIA's data sheets, by what PyTorch calls the device.
DATA_SHEET_FLOPS = {"H100 80GB HBM3": 989e12, "H200": 989e12, "A100": 312e12}


class Device:
    """Clock, memory and graphs of a device.

    Args:
        kind: "cuda" or "cpu".

    Raises:
        RuntimeError: there is no CUDA device.
    """

    def __init__(self, kind: str) -> None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device; DEVICE=cpu makes a dry run")
        self.kind = kind

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_dry(self) -> bool:
        """True where the device is no GPU; figures then do not describe a GPU."""
        return not self.is_cuda

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_cuda else "CPU, a dry run"

    @property
    def data_sheet_flops(self) -> float | None:
        """Operations per second by the data sheet, or None for a device without an entry."""
        for name, flops in DATA_SHEET_FLOPS.items():
            if name in self.name:
                return flops
        return None

    @property
    def memory_bytes(self) -> int:
        """Memory that this process has or can get; a dry run has as much as an H200.

        Other processes may hold some of the device.
        """
        if not self.is_cuda:
            return 150_000_000_000
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a process has one device
    def copy_rate(self, num_bytes: int) -> float:
        """Returns the bytes per second of a copy, measured once in a process."""
        return copy_bytes_per_s(self, num_bytes)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a process has one device
    def matmul_rate(self, size: int) -> float:
        """Returns the operations per second of a product, measured once in a process."""
        return matmul_flops_per_s(self, size)

    def answers(self) -> bool:
        """Frees cached memory; returns False if the device has failed for good in this process."""
        gc.collect()
        try:
            self.synchronize()
            self.free()
        except RuntimeError:
            traceback.print_exc()
            return False
        return True

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int, warmup: int = 3) -> float:
        """Median time of a call on the device, by events around each; the host runs ahead."""
        for _ in range(warmup):
            work()
        self.synchronize()
        if not self.is_cuda:
            return statistics.median(host_seconds(work) for _ in range(repeats))
        marks = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            marks.append((begin, end))
        self.synchronize()
        return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in marks)

    def clock_seconds(self, work: Callable[[], object], repeats: int, warmup: int = 1) -> float:
        """Median time of a call until the device has done it, by the clock of the host."""

        def waited() -> None:
            work()
            self.synchronize()

        for _ in range(warmup):
            waited()
        return statistics.median(host_seconds(waited) for _ in range(repeats))

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most that tensors take at once during a call; 0 in a dry run."""
        if not self.is_cuda:
            work()
            return 0
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated()

    def free(self) -> None:
        """Gives cached memory back."""
        if self.is_cuda:
            torch.cuda.empty_cache()


class Named(Device):
    """A device that another process uses: this one takes none of its memory."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def name(self) -> str:
        """Returns a name until that process has said another."""
        return UNNAMED if self.is_cuda else "CPU, a dry run"


def host_seconds(work: Callable[[], object]) -> float:
    """Time of a call by the clock of the host."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def copy_bytes_per_s(device: Device, num_bytes: int) -> float:
    """Measures a copy within the device; counts bytes that are read and written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device.kind)
    target = torch.empty_like(source)
    return 2 * num_bytes / device.seconds(lambda: target.copy_(source), 20)


def matmul_flops_per_s(device: Device, size: int) -> float:
    """Measures a product of two square bf16 matrices of random numbers."""
    a, b = (torch.randn(size, size, device=device.kind).bfloat16() for _ in range(2))
    out: Tensor = torch.empty_like(a)
    return 2 * size**3 / device.seconds(lambda: torch.matmul(a, b, out=out), 20)
