"""Computes how much memory a rank has for its partition."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from smp._device import device_module, is_accelerator
from smp.config.schema import Config
from smp.modules import packed
from smp.modules.state_bytes import MASTER_BYTES

# The rest is for what the estimate leaves out: workspaces, fragments, the program itself.
_USABLE = 0.9
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def device_room_bytes(device: torch.device, local_size: int) -> int:
    """Returns the bytes that parameters, optimizer and activations of this rank may take.

    Args:
        device: device of this rank.
        local_size: number of ranks of this host, which share its memory if the device is the CPU.
    """
    if is_accelerator(device):
        return int(_USABLE * device_module(device).get_device_properties(device).total_memory)
    return int(_USABLE * _host_bytes() / local_size)


def state_factor(parameters: Iterable[nn.Parameter], config: Config, shard_size: int) -> float:
    """Returns bytes of a parameter with gradient and Adam's state, per parameter byte; at least 1.

    Quantized weights have neither.

    Args:
        parameters: parameters of the model, before they are cast.
        config: configuration, with the precision of training and what is sharded.
        shard_size: number of ranks that hold one copy of the state together.
    """
    num_elements = trained_bytes = packed_bytes = 0
    for parameter in parameters:
        if packed.is_packed(parameter):
            packed_bytes += packed.num_bytes(parameter)
            continue
        num_elements += parameter.numel()
        trained_bytes += parameter.numel() * parameter.element_size()
    if num_elements == 0:
        return 1.0 if packed_bytes else 4.0
    factor = _trained_factor(trained_bytes / num_elements, config, shard_size)
    return (packed_bytes + factor * trained_bytes) / (packed_bytes + trained_bytes)


def _trained_factor(size: float, config: Config, shard_size: int) -> float:
    """Returns the factor for parameters of `size` bytes each; frozen ones count like others."""
    # In one dtype: parameter, gradient and two moments in the type of the parameter.
    whole, shared = size, 3 * size
    if config.half_dtype is not None:
        whole, shared = 2.0, 12.0 + MASTER_BYTES[config.bf16_masters]
    if config.sharded_data_parallel_degree > 1:
        whole, shared = 0.0, whole + shared
    return max(1.0, (whole + shared / shard_size) / size)


def _host_bytes() -> int:
    """Returns the memory of the machine, or of this process's control group if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical]
    for path in _LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():  # "max" is no limit
            limits.append(int(text))
    return min(limits)
