"""Decides how the parameters of a model are stored, and what replicas must do for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from smp.storage.flat_parameters import FlatParameters
from smp.storage.protocol import Storage
from smp.storage.sharded import ShardedParameters
from smp.storage.whole import WholeParameters
from smp.world.rank import Rank


@dataclass(frozen=True)
class Lockstep:
    """The reason why all replicas have to run the same steps.

    Attributes:
        key: key of the configuration.
        value: value of that key.
        reason: words for what a replica needs from the others.
        is_forward: whether forwards need it, and not only updates.
    """

    key: str
    value: object
    reason: str
    is_forward: bool


def lockstep_of(rank: Rank) -> Lockstep | None:
    """Returns the lockstep that the storage of parameters demands; None: replicas are free.

    The result is the same on all ranks.
    """
    degree = rank.config.sharded_data_parallel_degree
    if degree > 1:
        reason = "forwards need the shards of all replicas"
        return Lockstep("sharded_data_parallel_degree", degree, reason, is_forward=True)
    if rank.sizes["shard"] > 1:
        reason = "updates need the shards of all replicas"
        return Lockstep("shard_optimizer_state", True, reason, is_forward=False)
    return None


def make_storage(
    rank: Rank,
    root: nn.Module,
    runs_here: Callable[[nn.Module], bool],
    *,
    bucket_cap_bytes: int,
    overlap: bool,
) -> Storage:
    """Makes the storage that the configuration demands, still without parameters.

    Args:
        rank: rank of this process.
        root: the user's model.
        runs_here: returns whether this rank runs the forward of a module.
        bucket_cap_bytes: size of a gradient bucket.
        overlap: whether parts of parameters may be sent while modules run.
    """
    lockstep = lockstep_of(rank)
    if lockstep is None:
        return WholeParameters(rank, root)
    if lockstep.is_forward:
        return ShardedParameters(rank, root, runs_here)
    return FlatParameters(rank, root, bucket_cap_bytes=bucket_cap_bytes, overlap=overlap)
