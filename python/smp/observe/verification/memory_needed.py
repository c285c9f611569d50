"""Estimates whether a second run of a model or of a part of the batch fits into this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from smp._device import device_module, is_accelerator
from smp.partition.costs import Trace

_CGROUP = Path("/sys/fs/cgroup")
#: limit and use of memory, by the version of control groups
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
# Values kept, values on the device, gradients, and temporary tensors of a backward.
_COPIES = 4
_SHARE_OF_FREE = 0.5


def reason_not_to_fit(
    root: nn.Module, device: torch.device, num_processes: int, trace: Trace | None
) -> str | None:
    """Returns a reason in words if memory is not enough for the whole model, or None.

    Args:
        root: the model.
        device: device of this process.
        num_processes: number of processes of this host.
        trace: trace of the model; without it activations count as large as four models.
    """
    parameters = sum(p.numel() * p.element_size() for p in root.parameters())
    activations = _COPIES * parameters
    if trace is not None:
        activations = sum(cost.activation_bytes for cost in trace.costs)
    needed = _COPIES * parameters + activations
    free = free_bytes(device, num_processes)
    if needed <= _SHARE_OF_FREE * free:
        return None
    return (
        f"the whole model in one process takes about {needed / 1e9:.2g} GB, and {free / 1e9:.2g} "
        "GB are free"
    )


def reason_not_to_fit_again(device: torch.device, num_processes: int) -> str | None:
    """Returns a reason if the peak of this process does not fit a second time, or None.

    Args:
        device: device of this process.
        num_processes: number of processes of this host.
    """
    free = free_bytes(device, num_processes)
    if is_accelerator(device):
        module = device_module(device)
        held = module.memory_allocated(device)
        needed = float(module.max_memory_allocated(device) - held)
        free += module.memory_reserved(device) - held
    else:
        sizes = _sizes_in("/proc/self/status")
        needed = sizes.get("VmHWM", 0.0) - sizes.get("VmRSS", 0.0)
    if needed <= free:
        return None
    return (
        f"the step has held {needed / 1e9:.2g} GB more than there are in use now, and "
        f"{free / 1e9:.2g} GB are free"
    )


def free_bytes(device: torch.device, num_processes: int) -> float:
    """Returns the free memory of a device; on the CPU the share of one of the host's processes."""
    if is_accelerator(device):
        return float(device_module(device).mem_get_info(device)[0])
    free = _sizes_in("/proc/meminfo").get("MemAvailable", float("inf"))
    for limit, used in _LIMITS:
        try:
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):
            continue  # no limit, or no control groups
    return max(free, 0.0) / num_processes


def _sizes_in(path: str) -> dict[str, float]:
    """Returns the sizes in a file of the kernel, in bytes by name."""
    rows = (line.split() for line in Path(path).read_text().splitlines())
    return {row[0].rstrip(":"): float(int(row[1]) << 10) for row in rows if row[-1:] == ["kB"]}
