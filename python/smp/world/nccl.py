"""How NCCL is set up: one order of several communicators, and streams."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smp._torch_releases import limit_ctas

# Kernels of several communicators start on the device in the order in which the host has issued
# them. Without it two ranks may each start what the other one starts second, and both wait. All
# ranks issue them in one order (docs/design/stream_order.md). NCCL before 2.26 does not know it.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def set_launch_order(environ: MutableMapping[str, str] = os.environ) -> None:
    """Asks NCCL for one order of its communicators, unless the user has decided.

    NCCL reads it once, so it comes before the first communicator.

    Args:
        environ: of this process.
    """
    environ.setdefault(LAUNCH_ORDER, "1")


# Of the device that a tensor on its way between two ranks may take: its kernel waits for the other
# rank meanwhile.
WAY_CTAS = 4


def group_options(timeout_s: float, max_ctas: int | None = None) -> Any:
    """Options of a process group of NCCL.

    Its kernels run on a stream of high priority: blocks of a sum that is ready start before those
    of compute kernels that are queued.

    Args:
        timeout_s: after which the group counts as broken.
        max_ctas: blocks of one kernel, where this release of torch can say it.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.is_high_priority_stream = True
    if max_ctas is not None:
        limit_ctas(options, max_ctas)
    return options
