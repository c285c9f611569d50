"""Decides how the parameters of a model are stored, and what that asks of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from smp.storage.flat_parameters import FlatParameters
from smp.storage.protocol import Storage
from smp.storage.sharded import ShardedParameters
from smp.storage.whole import WholeParameters
from smp.world import runtime


@dataclass(frozen=True)
class Lockstep:
    """Why all replicas have to run the same steps.

    Attributes:
        key: of the configuration.
        value: of that key.
        reason: what a replica needs of the others.
        is_forward: forwards need it, not updates alone.
    """

    key: str
    value: object
    reason: str
    is_forward: bool


def lockstep_of(current: runtime.Runtime) -> Lockstep | None:
    """What the storage of parameters asks of the replicas; None where each may go its own way.

    The same on all ranks.
    """
    degree = current.config.sharded_data_parallel_degree
    if degree > 1:
        reason = "forwards need the shards of all replicas"
        return Lockstep("sharded_data_parallel_degree", degree, reason, is_forward=True)
    if current.sizes["shard"] > 1:
        reason = "updates need the shards of all replicas"
        return Lockstep("shard_optimizer_state", True, reason, is_forward=False)
    return None


def make_storage(
    current: runtime.Runtime, root: nn.Module, *, bucket_cap_bytes: int, overlap: bool
) -> Storage:
    """The storage that the configuration asks for, still without parameters.

    Args:
        current: the runtime.
        root: the user's model.
        bucket_cap_bytes: size of a gradient bucket.
        overlap: parts of parameters may travel while modules run.
    """
    lockstep = lockstep_of(current)
    if lockstep is None:
        return WholeParameters(current, root)
    if lockstep.is_forward:
        return ShardedParameters(current, root)
    return FlatParameters(current, root, bucket_cap_bytes=bucket_cap_bytes, overlap=overlap)
