"""The process group of the public data-parallel interface, on top of `smp.init` and torch's groups.

The interface has one group, that of all processes; others are refused.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

import smp._C as _C
from smp.world import comm, runtime
from smp.world.launch import read_launch
from smp.world.state import state

BACKENDS = ("smddp", "nccl", "gloo")
"""Names that scripts pass to `init_process_group`; the device of the ranks decides."""


class ReduceOp(enum.Enum):
    """An operation that makes one tensor from those of several ranks."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class group:
    """The groups of processes; there is only one."""

    WORLD: Any = "world"


_OPS = {
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,  # parts are divided first: Gloo has no mean
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}


def is_available() -> bool:
    """Returns whether a launcher has started this process as one of a job. Not collective."""
    return read_launch(os.environ, socket.gethostname()).launcher != "single"


def is_initialized() -> bool:
    """Returns whether `init_process_group` was called, or `smp.init` with the key ``ddp``."""
    return state.cfg is not None and state.cfg.ddp


def init_process_group(backend: str | None = None, *_: Any, **more: Any) -> None:
    """Calls ``smp.init({"ddp": True})`` unless that was done. Collective.

    Args:
        backend: one of `BACKENDS`, without effect: the device of the ranks decides.
        more: other arguments of ``torch.distributed.init_process_group``. The address of the job
            comes from the launcher, and the longest wait from ``SMP_TIMEOUT_S``; ``rank`` and
            ``world_size`` are compared with the launcher's.

    Raises:
        ValueError: the backend is another one, the launcher has another rank or size, or the
            launcher's configuration splits models over ranks.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"smdistributed.dataparallel: backend {backend!r} is not there; expected one of "
            f"{', '.join(BACKENDS)}, or none"
        )
    if not is_initialized():
        runtime.init({"ddp": True})
    for name, own in (("rank", comm.rank()), ("world_size", comm.size())):
        given = more.get(name, -1)
        if given not in (-1, own):
            raise ValueError(
                f"{_C.rank_prefix()}init_process_group({name}={given}), and the launcher says "
                f"{own}; leave it out"
            )
    if comm.mp_size() > 1:
        raise ValueError(
            f"{_C.rank_prefix()}smdistributed.dataparallel: the configuration splits models over "
            f"{comm.mp_size()} ranks, so not every rank is a replica; use smp.DistributedModel, "
            "or leave pipeline_parallel_degree and tensor_parallel_degree out"
        )
    comm.get_world_process_group()  # a world of one makes its group on the first call


# ---- ranks and sizes -----------------------------------------------------------------


def get_world_size(group: Any = group.WORLD) -> int:
    """Returns the number of processes."""
    _check(group, "get_world_size")
    return comm.size()


def get_rank(group: Any = group.WORLD) -> int:
    """Returns the position among all processes."""
    _check(group, "get_rank")
    return comm.rank()


def get_local_rank() -> int:
    """Returns the position among the processes of this host."""
    return comm.local_rank()


# ---- tensors -------------------------------------------------------------------------


def all_reduce(
    tensor: Tensor,
    op: ReduceOp | None = ReduceOp.SUM,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduces a tensor of any shape over all ranks, in place. Collective.

    Args:
        tensor: tensor with the same shape and dtype on all ranks.
        op: operation; None is SUM. AVERAGE divides first, and needs a floating dtype.
        group: `group.WORLD`.
        async_op: return at once, with an object to wait for.

    Raises:
        TypeError: AVERAGE is asked for and the tensor holds integers.
    """
    world = _check(group, "all_reduce")
    op = ReduceOp.SUM if op is None else ReduceOp(op)
    if op is ReduceOp.AVERAGE:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"{_C.rank_prefix()}all_reduce: AVERAGE of {tensor.dtype} would be cut to whole "
                "numbers; give a floating tensor, or SUM"
            )
        tensor.div_(world.size())
    return _work(dist.all_reduce(tensor, _OPS[op], world, async_op))


def broadcast(
    tensor: Tensor, src: int = 0, group: Any = group.WORLD, async_op: bool = False
) -> dist.Work | None:
    """Copies the tensor of rank ``src`` to all ranks, in place. Collective."""
    return _work(dist.broadcast(tensor, src, _check(group, "broadcast"), async_op))


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = group.WORLD, async_op: bool = False
) -> dist.Work | None:
    """Copies the tensors of all ranks into a list of their shape on each rank. Collective."""
    world = _check(group, "all_gather")
    return _work(dist.all_gather(tensor_list, tensor, world, async_op))


def all_to_all_single(
    output_t: Tensor,
    input_t: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = group.WORLD,
    async_op: bool = False,
) -> dist.Work | None:
    """Sends each rank its part of the first dimension of this rank's input. Collective."""
    world = _check(group, "all_to_all_single")
    received, sent = (
        None if one is None else list(one) for one in (output_split_sizes, input_split_sizes)
    )
    work = dist.all_to_all_single(output_t, input_t, received, sent, world, async_op)
    return _work(work)


def barrier(group: Any = group.WORLD, async_op: bool = False) -> dist.Work | None:
    """Returns when all ranks have called it. Collective."""
    return _work(dist.barrier(_check(group, "barrier"), async_op))


def _check(given: Any, what: str) -> dist.ProcessGroup:
    """Returns the process group of all ranks, and refuses all others."""
    world = comm.get_world_process_group()
    if given is not None and given is not group.WORLD and given is not world:
        raise ValueError(
            f"{_C.rank_prefix()}{what}: smdistributed.dataparallel has one group, "
            f"group.WORLD; got {given!r}; call torch.distributed for others"
        )
    return world


def _work(work: Any) -> dist.Work | None:
    return work  # type: ignore[no-any-return]
