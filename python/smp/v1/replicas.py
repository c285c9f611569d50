"""torch's DistributedDataParallel with sums on the CPU by the library."""

# Annotations are no strings here: torch compares those of the hook.
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp._C as _C
from smp.v1 import data_parallel
from smp.world import runtime
from smp.world.rank import Rank

_SLICE_S = 0.25  # seconds of a wait between checks whether it can end
_GRACE_S = 2.0  # seconds for messages about a failure to arrive


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """A replica of a module on each rank, whose gradients are averaged in backward.

    It is torch's class with the group of `init_process_group`. On the CPU the library's
    communicator sums buckets: over several hosts by hosts, where ``ddp_dist_backend`` and the hosts
    permit it, and errors name the rank that failed. On GPUs torch sums them over NCCL.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: int | None = None,
        **more: Any,
    ) -> None:
        """Makes the replica of this rank.

        Args:
            module: module with the same parameters on all ranks; values of rank 0 are copied.
            device_ids, output_device, broadcast_buffers, bucket_cap_mb: the same as torch's.
            process_group: None or ``group.WORLD``.
            more: further arguments of torch's.

        Raises:
            RuntimeError: `init_process_group` was not called.
            ValueError: the process group is another one.
        """
        if not data_parallel.is_initialized():
            raise RuntimeError(
                "DistributedDataParallel: call smdistributed.dataparallel.torch.distributed."
                "init_process_group() first"
            )
        world = data_parallel._check(process_group, "DistributedDataParallel")
        if bucket_cap_mb is not None:
            more["bucket_cap_mb"] = bucket_cap_mb
        super().__init__(
            module,
            list(device_ids) if device_ids is not None else None,
            output_device,
            broadcast_buffers=broadcast_buffers,
            process_group=world,
            **more,
        )
        rank = runtime.current().rank
        sums = rank.comms.dp_cp
        if sums is not None and rank.device.type == "cpu":
            self.register_comm_hook(_Sums(rank, sums), _Sums.begin)


class _Sums:
    """A hook that averages buckets over the data-parallel ranks while backward goes on."""

    def __init__(self, rank: Rank, communicator: _C.Communicator) -> None:
        assert rank.board is not None, "there are other ranks"
        self._communicator, self._board = communicator, rank.board
        self._peers, self._timeout_s = rank.groups["dp_cp"], rank.timeout_s
        # A thread completes the futures of torch; sums of one group end in their order.
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="smp-ddp")

    def begin(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begins the sum of a bucket; its future holds the mean, in the same memory."""
        flat = bucket.buffer()
        work = self._communicator.all_reduce(flat.div_(self._communicator.size))
        begun: torch.futures.Future[None] = torch.futures.Future()
        # An error in a callback is an error of torch's core as well, and so of backward.
        summed = begun.then(lambda _: self._wait(work, flat))
        self._waiter.submit(begun.set_result, None)
        return summed

    def _wait(self, work: "_C.Work", flat: Tensor) -> Tensor:
        began_s = time.monotonic()
        gone_s: float | None = None
        while True:
            try:
                work.wait(_SLICE_S)
                return flat
            except RuntimeError:
                self._board.raise_if_faulted()
                left = next((peer for peer in self._peers if self._board.has_left(peer)), None)
                now_s = time.monotonic()
                if gone_s is None and (left is not None or work.done()):
                    gone_s = now_s
                if gone_s is not None and now_s - gone_s > _GRACE_S and left is not None:
                    raise RuntimeError(
                        f"{_C.rank_prefix()}global_rank {left} has left (its script has finished), "
                        "so a sum of gradients does not end; run as many backwards on each rank"
                    ) from None
                if now_s - (gone_s or now_s) > _GRACE_S or now_s - began_s > self._timeout_s:
                    raise
            time.sleep(_SLICE_S if work.done() else 0.0)
