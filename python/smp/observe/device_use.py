"""Reads how busy a device is from its driver (NVML)."""

from __future__ import annotations

import torch

from smp.world.log import first_rank_log


def device_utilisation(device: torch.device) -> float | None:
    """Returns the percentage of time in which a kernel ran recently; None if it is not known.

    Args:
        device: device of a rank; the CPU has no such figure.
    """
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except (ImportError, RuntimeError) as error:  # no package, or no support by the driver
        if first_rank_log.is_new("utilisation of devices"):
            first_rank_log.info(
                "smp: figures of steps are without device_util: %s (pip install nvidia-ml-py)",
                error,
            )
        return None
