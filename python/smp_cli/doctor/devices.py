"""Probes the GPUs that torch sees."""

from __future__ import annotations

from pathlib import Path

import torch

from smp_cli.doctor.report import Section, gib


def devices() -> Section:
    """Lists each GPU with its memory."""
    count = torch.cuda.device_count()
    section = Section("devices", {"GPUs": count})
    if not torch.cuda.is_available():
        if Path("/proc/driver/nvidia/gpus").exists():
            section.problems.append(
                f"the driver lists GPUs, but torch {torch.__version__} sees none: {_reason()}"
            )
        return section
    for index in range(count):
        section.values[f"GPU {index}"] = _describe(section, index)
    if count > 1:
        section.values["direct access"] = torch.cuda.can_device_access_peer(0, 1)
    return section


def _reason() -> str:
    if torch.version.cuda is None:
        return "its build has no CUDA"
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
