"""How large a bucket of gradients is where the user has not said it."""

from __future__ import annotations

import torch


class DefaultSize(int):
    """A default that a device may replace. As a number, it is that of the v1 interface."""


DEFAULT_MB = DefaultSize(25)

# A ring over n ranks sends a bucket in 2 (n - 1) pieces, each as large as bucket / n, and each
# costs some microseconds whatever its size. Over NVLink (hundreds of GB/s) 25 MB on eight ranks are
# pieces of 3 MB, of ten microseconds each; with 128 MB the fixed costs are below a tenth. The last
# bucket cannot overlap with backward; 128 MB are a fraction of a millisecond there. Over sockets of
# the CPU 25 MB take tens of milliseconds, and larger ones only come later.
_MB_OF_DEVICE = {"cuda": 128}


def bucket_cap_bytes(cap_mb: float, device: torch.device) -> int:
    """Bytes of a bucket.

    Args:
        cap_mb: in MiB; `DEFAULT_MB` itself, not a number equal to it: what suits the device.
        device: of the gradients.
    """
    if isinstance(cap_mb, DefaultSize):
        cap_mb = _MB_OF_DEVICE.get(device.type, int(DEFAULT_MB))
    return int(cap_mb * 2**20)
