"""Sets the device on which a thread works: PyTorch keeps the current one per thread."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from smp._device import device_module, is_accelerator


def enter(device: torch.device) -> None:
    """Makes ``device`` the current one of the calling thread, for good. Not collective.

    Tensors made on ``"cuda"`` without an index are put there, and so are pinned memory and kernels
    of libraries that ask for no device. In a new thread the default is device 0.

    Args:
        device: device of this rank; nothing happens on the CPU.
    """
    if is_accelerator(device):
        device_module(device).set_device(device)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one in a block, and restores the device afterwards.

    Args:
        device: device of this rank; nothing happens on the CPU.
    """
    return device_module(device).device(device) if is_accelerator(device) else nullcontext()
