"""The device of these tests: a GPU where there is one, else the CPU.

Most contracts hold on both, so the bodies of the tests are known to work before a GPU is there.
Tests of what only a GPU has (streams, waits of the host, its memory) are skipped on the CPU, with
the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_DEVICES = torch.cuda.device_count() if DEVICE == "cuda" else 0
#: Environment of processes that a test starts. Pipeline ranks may share a GPU.
ENV = {"SMP_DEVICE": DEVICE, "SMP_SHARE_GPU": "1"}

needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")
needs_two_devices = pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two CUDA devices")
needs_four_devices = pytest.mark.skipif(NUM_DEVICES < 4, reason="needs four CUDA devices")


def synchronize() -> None:
    """Waits until the device has finished its work; a CPU always has."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, PyTorch's operators raise where the host would wait for a GPU."""
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
