"""Stopping all ranks at one step boundary, and leaving with a checkpoint."""

from smp.world.preemption import (
    EXIT_RESUME,
    leave,
    request,
    requested,
    save_to,
)

__all__ = [
    "EXIT_RESUME",
    "leave",
    "request",
    "requested",
    "save_to",
]
