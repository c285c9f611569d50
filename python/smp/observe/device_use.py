"""How busy a device is, as its driver says (NVML)."""

from __future__ import annotations

import torch

from smp.world.log import first_rank_log


def device_utilisation(device: torch.device) -> float | None:
    """Percent of the last moments in which a kernel ran on the device; None where nobody knows.

    Args:
        device: of a rank; the CPU has no such figure.
    """
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except (ImportError, RuntimeError) as error:  # no package, or no driver that tells
        if first_rank_log.is_new("utilisation of devices"):
            first_rank_log.info(
                "smp: figures of steps are without device_util: %s (pip install nvidia-ml-py)",
                error,
            )
        return None
