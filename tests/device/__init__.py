"""Registers the late device: PyTorch's PrivateUse1 whose operators run later, without a GPU.

Importing this package makes `torch.device("late")` and `torch.late` usable. The design and what the
device can and cannot show: `docs/design/late_device.md`. Settings, read when a device is first
used: `SMP_LATE_DEVICES` (8), `SMP_LATE_MEMORY_MB` of each device (4096), `SMP_LATE_SEED` and
`SMP_LATE_DELAY_US`, the longest random pause of a stream before a piece of work (0: no pauses).
"""

from __future__ import annotations

import atexit
import faulthandler
import os
from collections.abc import Callable

import smp_late_device as _late
import torch
from smp_late_device import counts, reset_counts, set_delays, take_error

from tests.device import late_module, process_group

__all__ = ["counts", "enqueue", "reset_counts", "set_delays", "take_error", "times_late"]


def enqueue(stream: torch.Stream, function: Callable[[], object]) -> None:
    """Queues a function of the host on a stream, as `cudaLaunchHostFunc` does.

    Args:
        stream: stream of a late device.
        function: callable without arguments; its error is the device's, found at the next wait.
    """
    _late.enqueue(stream.stream_id, stream.device_index, function)


def times_late(operator: str) -> int:
    """Returns how often an operator such as "aten::mm" has run later, since `reset_counts`."""
    return counts().get(operator, {}).get("late", 0)


def _register() -> None:
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", late_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    _late.explain_faults()
    _late.set_delays(
        int(os.environ.get("SMP_LATE_SEED", "1")), int(os.environ.get("SMP_LATE_DELAY_US", "0"))
    )
    if torch.distributed.is_available():
        process_group.register()
    atexit.register(_late.stop)


_register()
