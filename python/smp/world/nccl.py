"""Sets up NCCL: one order of several communicators, failures, and streams."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp._torch_releases import limit_ctas

logger = logging.getLogger("smp")

# Kernels of several communicators then start on the device in the order in which the host issues
# them. Without this variable two ranks may start them in opposite orders and block each other. All
# ranks issue them in one order (docs/design/stream_order.md). NCCL before 2.26 ignores it.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"

# PyTorch's watchdog otherwise ends the process (SIGABRT) as soon as an operation fails or is late.
# The library's own watch aborts the groups then, and the script gets an error that names the rank.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_FORMER_ERROR_HANDLING = "NCCL_ASYNC_ERROR_HANDLING"  # read by PyTorch, too


def set_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets variables of NCCL and of PyTorch's groups of NCCL that the user has not set.

    NCCL reads its variable once, and each group reads PyTorch's when it is made.

    Args:
        environ: environment variables of this process.
    """
    environ.setdefault(LAUNCH_ORDER, "1")
    if _FORMER_ERROR_HANDLING not in environ:
        environ.setdefault(ERROR_HANDLING, "0")


# Streams of a device share its hardware queues, where work that waits blocks all work behind it. A
# rank has up to 30 streams. `smp run` sets the same value.
DEVICE_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
NUM_QUEUES = 32
_NUM_QUEUES_OF_CUDA = 8


def set_device_queues(
    environ: MutableMapping[str, str] = os.environ, *, is_cuda_in_use: bool | None = None
) -> None:
    """Asks CUDA for as many hardware queues as it has, unless the user has decided.

    CUDA reads the variable when it is first used. A later call changes nothing and logs a warning
    if there are fewer queues.

    Args:
        environ: environment variables of this process.
        is_cuda_in_use: whether this process has used CUDA; None: as torch has it.
    """
    if is_cuda_in_use is None:
        is_cuda_in_use = torch.cuda.is_initialized()
    if not is_cuda_in_use:
        environ.setdefault(DEVICE_QUEUES, str(NUM_QUEUES))
        return
    given = environ.get(DEVICE_QUEUES, "")
    num_queues = int(given) if given.isdecimal() else _NUM_QUEUES_OF_CUDA
    if num_queues < NUM_QUEUES:
        logger.warning(
            "smp: the script has used CUDA before smp.init, with %d hardware queues: copies and "
            "collectives may block each other; start it with smp run, set %s=%d, or use CUDA later",
            num_queues,
            DEVICE_QUEUES,
            NUM_QUEUES,
        )


# Blocks of the device that a copy between two ranks may occupy: its kernel keeps them while it
# waits for the other rank.
CHANNEL_CTAS = 4


def group_options(timeout_s: float, max_ctas: int | None = None) -> Any:
    """Returns options of a process group of NCCL.

    Its kernels run on a stream of high priority: blocks of a sum that is ready start before those
    of compute kernels that are queued.

    Args:
        timeout_s: seconds after which the group counts as broken.
        max_ctas: blocks of one kernel, if this release of torch can limit them.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.is_high_priority_stream = True
    if max_ctas is not None:
        limit_ctas(options, max_ctas)
    return options
