"""Refuses wrappers of modules that cannot be combined with smp."""

from __future__ import annotations

import sys

import torch
from torch import nn

_REDUCES = "smp reduces gradients itself: unwrap it"
_SHARDS = "smp shards by itself (configuration key sharded_data_parallel_degree): unwrap it"

#: Module, class and reason. A script that has made such a wrapper has imported its module.
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", _REDUCES),
    ("torch.nn.parallel", "DataParallel", _REDUCES),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", _SHARDS),
    ("torch.distributed.fsdp", "FSDPModule", _SHARDS),
)


def reason_to_refuse(module: nn.Module) -> str | None:
    """Returns why smp cannot train a model with this module, or None."""
    for source, name, reason in _WRAPPERS:
        wrapper = getattr(sys.modules.get(source), name, None)
        if wrapper is not None and isinstance(module, wrapper):
            return f"is a {name}; {reason}"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, which smp cannot partition"
    return None
