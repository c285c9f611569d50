"""The backend "late" of torch.distributed: collectives in the order of streams, over Gloo."""

from __future__ import annotations

from datetime import timedelta

import smp_late_device as _late
import torch.distributed as dist


def _new_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.distributed_c10d._Backend:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("late", store), rank, world_size, timeout)
    return _late.process_group(gloo)


def register() -> None:
    """Makes groups like "cpu:gloo,late:late" possible; "late" alone is for device tensors."""
    dist.Backend.register_backend("late", _new_group, devices=["late"])
