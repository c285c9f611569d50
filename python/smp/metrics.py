"""Figures of a run."""

from smp.observe.metrics import (
    Counters,
    StepMeter,
    StepRecord,
    device_peak_bytes,
    difference,
    executed_order,
    executed_schedule,
    format_line,
    offload_stats,
    resident_bytes,
    server_stats,
    transformer_flops_per_token,
)
from smp.observe.step_log import log, to

__all__ = [
    "Counters",
    "StepMeter",
    "StepRecord",
    "device_peak_bytes",
    "difference",
    "executed_order",
    "executed_schedule",
    "format_line",
    "log",
    "offload_stats",
    "resident_bytes",
    "server_stats",
    "to",
    "transformer_flops_per_token",
]
