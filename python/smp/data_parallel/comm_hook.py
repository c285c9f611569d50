"""Sums gradients by a hook of the user, with the signature of torch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp._C as _C
from smp.world.rank import Rank


@dataclass
class CommHook:
    """A hook that replaces the all-reduce of a bucket.

    Attributes:
        state: handed to each call.
        function: ``function(state, bucket) -> Future[Tensor]``.
    """

    state: object
    function: Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]

    def take_over(self, other: CommHook) -> None:
        """Uses another hook's state and function from now on."""
        self.state, self.function = other.state, other.function


class _Launcher:
    """Runs a hook for the buckets of one reducer, in the thread that completes them."""

    def __init__(self, hook: CommHook) -> None:
        self._hook = hook
        #: parameters and their offsets, by bucket
        self.buckets: list[tuple[list[nn.Parameter], list[int]]] = []

    def __call__(self, bucket_idx: int, flat: Tensor) -> _C.Work:
        future: Any = self._hook.function(self._hook.state, self._bucket(bucket_idx, flat))
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"a communication hook returns a torch.futures.Future of the summed bucket, got a "
                f"{type(future).__name__}"
            )
        work = _C.PromisedWork(lambda: _take(future, flat))
        future.add_done_callback(lambda _: work.complete())
        return work

    def _bucket(self, bucket_idx: int, flat: Tensor) -> dist.GradBucket:
        count = len(self.buckets)
        if bucket_idx < 0:  # an additional bucket, which is never the last
            return _C.make_grad_bucket(count, count + 2, flat, [0], [])
        params, offsets = self.buckets[bucket_idx]
        return _C.make_grad_bucket(bucket_idx, count, flat, offsets, params)


def _take(future: Any, flat: Tensor) -> None:
    result = future.wait()
    if isinstance(result, list | tuple) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor) or result.numel() != flat.numel():
        raise TypeError(
            f"the future of a communication hook has a tensor of {flat.numel()} elements, got "
            + (f"{result.numel()}" if isinstance(result, Tensor) else type(result).__name__)
        )
    if result.data_ptr() != flat.data_ptr():
        flat.copy_(result.view(flat.shape))


def hooked(
    communicator: _C.Communicator, hook: CommHook
) -> tuple[_C.Communicator, Callable[[_C.Reducer, Sequence[nn.Parameter], int], None]]:
    """Returns a group that sums buckets by a hook, and a function that connects it to a reducer.

    Args:
        communicator: group of the ranks that reduce.
        hook: the user's hook.

    Returns:
        the group, and the function, which takes the reducer, its parameters and its bucket size in
        bytes.
    """
    launcher = _Launcher(hook)
    group = _C.HookedGroup(communicator, launcher)

    def connect(
        reducer: _C.Reducer, parameters: Sequence[nn.Parameter], bucket_cap_bytes: int
    ) -> None:
        plan = _C.plan_shards(reducer.records, bucket_cap_bytes, 1, _C.ShardLayout.EQUAL_CUT)
        assert len(plan) == reducer.num_buckets
        launcher.buckets = [
            (
                [parameters[held.record_idx] for held in bucket.holdings[0]],
                [held.offset for held in bucket.holdings[0]],
            )
            for bucket in plan
        ]
        group.set_buckets([reducer.flat(idx) for idx in range(reducer.num_buckets)])

    return group, connect


def refuse_comm_hook(rank: Rank, overlaps: bool, of_storage: str | None) -> None:
    """Refuses a hook where gradients are not summed in buckets that all replicas have whole.

    Args:
        rank: rank of this process.
        overlaps: whether buckets are reduced while backward goes on.
        of_storage: key and value of the configuration by which parameters, or the state of their
            optimizer, are sharded over replicas; None if they are not.

    Raises:
        ValueError: the configuration forbids a hook; the message has the key.
    """
    config = rank.config
    reasons = {
        f"ddp={config.ddp}": not config.ddp,
        "overlapping_allreduce=False": not overlaps,
        str(of_storage): of_storage is not None,
        f"tensor_parallel_degree={config.tensor_parallel_degree}": rank.sizes["tp"] > 1,
        f"update_in_backward={config.update_in_backward}": config.update_in_backward,
        # The hook's group has lost ranks then, and its state is the script's.
        f"on_failure={config.on_failure!r}": config.goes_on,
        # Hooks sum over `smp.get_dp_process_group()`, which leaves ranks with the same batch out.
        f"context_parallel_degree={config.context_parallel_degree}": rank.sizes["cp"] > 1,
    }
    for key, is_so in reasons.items():
        if is_so:
            raise ValueError(
                f"{_C.rank_prefix()}smp config: {key}: register_comm_hook replaces the all-reduce "
                "of whole gradients over all data-parallel ranks while backward goes on, which "
                "there is none of; leave the hook out or change the key"
            )
