"""Chooses the size of gradient buckets where the user has not."""

from __future__ import annotations

import torch


class DefaultSize(int):
    """A default size in MiB, as in the v1 interface, that a device may replace."""


DEFAULT_MB = DefaultSize(25)

# A ring over n ranks sends a bucket in 2 (n - 1) pieces of bucket / n, and each piece costs some
# microseconds whatever its size. Over NVLink (hundreds of GB/s) 25 MB on eight ranks are pieces of
# 3 MB, of ten microseconds each; with 128 MB the fixed costs are below a tenth. The last bucket
# cannot overlap with backward; there 128 MB take a fraction of a millisecond. Over sockets of the
# CPU 25 MB take tens of milliseconds, and larger buckets only arrive later.
_MB_OF_DEVICE = {"cuda": 128}


def bucket_cap_bytes(cap_mb: float, device: torch.device) -> int:
    """Returns the size of a bucket in bytes.

    Args:
        cap_mb: size in MiB; `DEFAULT_MB` itself, not an equal number, means the device's default.
        device: device of the gradients.
    """
    if isinstance(cap_mb, DefaultSize):
        cap_mb = _MB_OF_DEVICE.get(device.type, int(DEFAULT_MB))
    return int(cap_mb * 2**20)
