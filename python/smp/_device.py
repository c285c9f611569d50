"""Serves accelerators by their type, so that no other module names CUDA for what any device has."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def is_accelerator(device: torch.device | str) -> bool:
    """Returns whether a device has streams of its own: all but the CPU and meta."""
    return _type_of(device) not in ("cpu", "meta")


def device_module(device: torch.device | str) -> Any:
    """Returns the module of PyTorch that serves an accelerator, such as ``torch.cuda``."""
    return torch.get_device_module(_type_of(device))


def registered_types() -> list[str]:
    """Returns the types of devices that a rank can work on.

    A backend of ``PrivateUse1`` is one of them once it has a name of its own.
    """
    other = torch._C._get_privateuse1_backend_name()
    return ["cpu", "cuda", *([other] if other != "privateuseone" else [])]


def _type_of(device: torch.device | str) -> str:
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Restores the random states of the CPU and of ``device`` at the end of a block."""
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def fp8_problem(device: torch.device) -> str | None:
    """Returns why a device cannot multiply numbers of 8 bits, or None if it can."""
    if not is_accelerator(device):
        return None
    if device.type != "cuda":
        return f"devices of type {device.type!r} have no products of 8 bits"
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 9):
        return None
    major, minor = capability
    return (
        f"{device} has compute capability {major}.{minor}, and products of 8 bits need 8.9 or later"
    )
