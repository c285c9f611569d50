"""The name ``smddp`` among the backends of `torch.distributed`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "smddp"


def register() -> None:
    """Makes ``torch.distributed.init_process_group("smddp")`` work. May be called twice."""
    if NAME.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Makes a group of NCCL if there are CUDA devices, else of Gloo."""
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
