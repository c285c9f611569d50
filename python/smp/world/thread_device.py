"""The device on which a thread works: PyTorch keeps the current one per thread."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def enter(device: torch.device) -> None:
    """Makes ``device`` the current one of the calling thread, for good. Not collective.

    What is made on ``"cuda"`` without an index goes there, and so do pinned memory and kernels of
    libraries that ask for no device; in a new thread all that would be device 0.

    Args:
        device: of this rank; nothing happens on the CPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def on(device: torch.device) -> AbstractContextManager[object]:
    """The same for a block of the calling thread, which then has the device that it had.

    Args:
        device: of this rank; nothing happens on the CPU.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
