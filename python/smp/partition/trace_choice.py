"""Chooses how a model is traced for its partition, and what follows if the trace fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp._device import device_module, is_accelerator
from smp.partition import trace_flops
from smp.partition.costs import Trace
from smp.partition.own_collectives import OwnCollective
from smp.partition.trace import TraceError, trace

_log = logging.getLogger("smp")

_MAX_SHARE_OF_FREE_MEMORY = 0.8


@dataclass(frozen=True)
class TraceOptions:
    """The options of a trace.

    Attributes:
        device: device of this process.
        real_device: device of a trace for real.
        measure_times: whether to measure own times of modules, which needs a trace for real.
        measure_memory: whether to measure what each module keeps, which needs a trace for real.
        peers: global ranks that run the same code at the same time; this one among them.
    """

    device: torch.device
    real_device: torch.device
    measure_times: bool = False
    measure_memory: bool = False
    peers: tuple[int, ...] = ()


def check_tracing(device: str, times: bool) -> None:
    """Raises a ValueError unless ``trace_device`` is valid and fits what is to be measured."""
    if device not in ("gpu", "cpu"):
        raise ValueError(f"trace_device must be 'gpu' or 'cpu', not {device!r}")
    if times and device == "cpu":
        raise ValueError(
            "smp config: trace_execution_times=True: times on the CPU say nothing about the GPU; "
            "use trace_device='gpu' or trace_execution_times=False"
        )


def trace_for_partition(
    root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: TraceOptions
) -> Trace | None:
    """Returns the best trace that the model allows; see `_best_trace`.

    Returns:
        None when the model cannot be traced at all; only its parameter sizes are known then.

    Raises:
        OwnCollective: the model calls a collective that would wait for ranks which run other code.
    """
    try:
        return _best_trace(root, args, kwargs, options)
    except OwnCollective as error:
        if not error.is_among(options.peers):
            raise
        _warn("trace", error, "using parameter sizes alone")
        return None


def _best_trace(
    root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: TraceOptions
) -> Trace | None:
    """Returns the best trace that the model allows, or None.

    The trace is made without memory unless measurements are wanted. A model that reads values of
    tensors into Python cannot be traced so; it runs for real on the CPU if its weights exist. Each
    step down is logged as a warning.
    """
    wanted = options.measure_times or options.measure_memory
    if wanted and _can_run(root, options.real_device):
        try:
            return trace(
                root,
                args,
                kwargs,
                device=options.real_device,
                fake=False,
                measure_times=options.measure_times,
                measure_memory=options.measure_memory,
            )
        except TraceError as error:
            _warn("trace on the device", error, "trying shapes only, without measurements")
    try:
        return trace(root, args, kwargs, device=options.device)
    except TraceError as error:
        # Any error counts: a mistake in the model raises in the step as well.
        if _has_no_values(root):
            _warn("trace with shapes only", error, "using parameter sizes alone")
            return None
        _warn("trace with shapes only", error, "running the model once on the CPU instead")
    try:
        return trace(root, args, kwargs, device=torch.device("cpu"), fake=False)
    except TraceError as error:
        _warn("trace on the CPU", error, "using parameter sizes alone")
        return None


def _warn(what: str, error: Exception, next_step: str) -> None:
    _log.warning("smp: the %s for the partition failed: %s; %s", what, error, next_step)


def _has_no_values(root: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in root.parameters())


def _can_run(root: nn.Module, device: torch.device) -> bool:
    """Returns whether the whole model has values and fits into the memory of the device."""
    if _has_no_values(root):
        _log.warning(
            "smp: nothing can be measured on a model on the meta device; tracing shapes only"
        )
        return False
    if not is_accelerator(device):
        return True
    needed = sum(trace_flops.num_bytes(p) for p in root.parameters() if p.device != device)
    free, _ = device_module(device).mem_get_info(device)
    if needed <= _MAX_SHARE_OF_FREE_MEMORY * free:
        return True
    _log.warning(
        "smp: the model (%.1f GB) does not fit into the free memory of %s (%.1f GB); tracing "
        "shapes only, without measurements",
        needed / 1e9,
        device,
        free / 1e9,
    )
    return False
