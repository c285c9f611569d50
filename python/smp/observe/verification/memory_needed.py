"""Estimates whether a second run of a model or of a part of the batch fits into this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from smp.partition.costs import Trace

_CGROUP = Path("/sys/fs/cgroup")
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
    if device.type == "cuda":
        free = float(torch.cuda.mem_get_info(device)[0])
    else:
        free = _free_host_bytes() / num_processes
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
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        needed = float(torch.cuda.max_memory_allocated(device) - held)
        cached = torch.cuda.memory_reserved(device) - held
        free = float(torch.cuda.mem_get_info(device)[0] + cached)
    else:
        sizes = {}
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                sizes[name] = float(int(value.split()[0]) << 10)
        needed = sizes.get("VmHWM", 0.0) - sizes.get("VmRSS", 0.0)
        free = _free_host_bytes() / num_processes
    if needed <= free:
        return None
    return (
        f"the step has held {needed / 1e9:.2g} GB more than there are in use now, and "
        f"{free / 1e9:.2g} GB are free"
    )


def _free_host_bytes() -> float:
    free = float("inf")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = float(int(line.split()[1]) << 10)
    for limit, used in (
        (_CGROUP / "memory.max", _CGROUP / "memory.current"),
        (
            _CGROUP / "memory" / "memory.limit_in_bytes",
            _CGROUP / "memory" / "memory.usage_in_bytes",
        ),
    ):
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):
            continue  # no limit, or no control groups
    return max(free, 0.0)
