"""Shares of a batch by the speed of the replicas' devices."""

from __future__ import annotations

import smp._C as _C
from smp.partition.devices import replica_shares, samples_of_shares
from smp.world import runtime
from smp.world.rank import Rank


def batch_slice(num_samples: int) -> slice:
    """Returns the samples of a common batch that this rank reads, by the speed of its replica.

    All ranks give the same number; their slices are the whole batch together. With
    ``device_speeds`` faster replicas read more samples, and the gradient stays that of the mean
    over the whole batch (a step weighs each microbatch by what its loss is a mean over).

    Args:
        num_samples: number of samples of the batch of all replicas.

    Raises:
        ValueError: there are fewer samples than replicas, or the ranks of a tensor-parallel group,
            which read equal numbers of samples, cannot divide those of their replica.
        RuntimeError: smp is not initialized.
    """
    return slice_of(runtime.current().rank, num_samples)


def slice_of(rank: Rank, num_samples: int) -> slice:
    """Returns the result of `batch_slice` for a rank."""
    shares = replica_shares(rank.config.device_speeds or (), rank.grid)
    counts = samples_of_shares(num_samples, shares)
    replica = rank.ranks["rdp"]
    begin, count = sum(counts[:replica]), counts[replica]
    tp = 1 if rank.config.prescaled_batch else rank.sizes["tp"]
    if count % tp:
        raise ValueError(
            f"{_C.rank_prefix()}batch_slice: the share of this replica, {count} of {num_samples} "
            f"samples, cannot be divided by the {tp} ranks of a tensor-parallel group, each of "
            "which reads a batch of its own; choose another number of samples, or "
            "prescaled_batch=True"
        )
    own = count // tp
    begin += own * rank.ranks["tp"] if tp > 1 else 0
    return slice(begin, begin + own)
