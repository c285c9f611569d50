"""GPUs: what torch sees, and how fast the way to them is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from smp_cli.doctor.report import Section, gib

_COPY_BYTES = 256 << 20
_REPEATS = 5


def devices() -> Section:
    """Each GPU with its memory; copies from and to the first."""
    section = Section("devices")
    has_driver = Path("/proc/driver/nvidia/gpus").exists()
    section.values["GPUs"] = torch.cuda.device_count()
    if not torch.cuda.is_available():
        if has_driver:
            section.problems.append(
                f"the driver lists GPUs, but torch {torch.__version__} sees none: "
                + ("its build has no CUDA" if torch.version.cuda is None else _why())
            )
        return section
    for index in range(torch.cuda.device_count()):
        section.values[f"GPU {index}"] = _describe(section, index)
    try:
        section.values["host to GPU 0"] = f"{_bandwidth('cpu', 'cuda:0') / 1e9:.1f} GB/s (pinned)"
        section.values["GPU 0 to host"] = f"{_bandwidth('cuda:0', 'cpu') / 1e9:.1f} GB/s (pinned)"
        if torch.cuda.device_count() > 1:
            section.values["GPU 0 to GPU 1"] = f"{_bandwidth('cuda:0', 'cuda:1') / 1e9:.1f} GB/s"
            section.values["direct access"] = torch.cuda.can_device_access_peer(0, 1)
    except RuntimeError as error:
        section.problems.append(f"a copy to or from a GPU failed: {str(error).splitlines()[0]}")
    return section


def _why() -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).splitlines()[0]
    return "CUDA_VISIBLE_DEVICES may hide them"


def _describe(section: Section, index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        section.problems.append(f"GPU {index} cannot be used: {str(error).splitlines()[0]}")
        return str(properties.name)
    if free < total / 2:
        section.problems.append(
            f"GPU {index} has {gib(free)} of {gib(total)} free; another process uses it"
        )
    version = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, compute capability {version}, {gib(free)} of {gib(total)} free"


def _bandwidth(source: str, destination: str) -> float:
    """Bytes per second, best of a few copies."""
    sent = _buffer(source)
    received = _buffer(destination)
    best = float("inf")
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        received.copy_(sent, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started_s)
    return _COPY_BYTES / best


def _buffer(device: str) -> Any:
    pinned = device == "cpu"
    return torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)
