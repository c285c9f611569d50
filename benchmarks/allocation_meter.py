"""Measures the bytes of tensors that a process holds, and their peak.

PyTorch counts the memory of GPUs, but not that of the CPU. `tracemalloc` does not see tensors, the
profiler sees those of one thread, and resident memory never shrinks for sure. So the functions
that give memory are replaced by counting ones, in a library that is loaded before all others:
start the process with :func:`preloaded`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("allocation_meter.c")


def preloaded(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Environment for a process that counts; compiles the library when it is out of date.

    PyTorch's allocator stays in place there: what ours keeps for later tensors would count.

    Args:
        folder: folder of the library; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "liballocation_meter.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = environment.get("CC", "cc")
        subprocess.run(
            [compiler, "-O2", "-fPIC", "-shared", "-o", str(library), str(SOURCE)], check=True
        )
    earlier = environment.get("LD_PRELOAD", "")
    return {
        **environment,
        "LD_PRELOAD": f"{library} {earlier}".strip(),
        "SMP_HOST_POOL": "0",
    }


class AllocationMeter:
    """Reads the counters of this process.

    Raises:
        RuntimeError: the process was not started with :func:`preloaded`.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "smp_meter_live"):
            raise RuntimeError(
                "expected a process with the allocation meter preloaded, got LD_PRELOAD="
                f"{os.environ.get('LD_PRELOAD', '')!r}; start it through benchmarks/run.py"
            )
        self._library = library
        for name in ("smp_meter_live", "smp_meter_peak"):
            getattr(library, name).restype = ctypes.c_longlong
        torch_library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
        # The function is Intel's; other libraries for products lack it, and have no such buffers.
        self._products = getattr(ctypes.CDLL(str(torch_library)), "mkl_serv_mem_stat", None)
        if self._products is not None:
            self._products.restype = ctypes.c_longlong

    def live(self) -> int:
        """Bytes in large blocks now."""
        return int(self._library.smp_meter_live())

    def workspace(self) -> int:
        """Returns the bytes of :meth:`live` that the library for products keeps per thread."""
        if self._products is None:
            return 0
        return int(self._products(ctypes.byref(ctypes.c_int(0))))

    def restart(self) -> int:
        """Forgets the peak; returns :meth:`live`."""
        self._library.smp_meter_reset()
        return self.live()

    def peak(self) -> int:
        """The most since :meth:`restart`."""
        return int(self._library.smp_meter_peak())
