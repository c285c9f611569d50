"""Weights of microbatches in the mean over the batches of all replicas."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence

import torch

import smp._C as _C
from smp.world.rank import Rank


def num_batches(rank: Rank) -> int:
    """Returns how many batches the replicas read together in a step."""
    if rank.config.prescaled_batch and rank.sizes["tp"] > 1:
        return rank.sizes["rdp"]
    return rank.sizes["dp"]


class BatchWeights:
    """Weighs the microbatches of this rank in the mean over the batches of all replicas.

    A loss that is a mean over w items (samples, tokens, class weights) has weight w. Let W be the
    sum of the weights of all microbatches of all replicas: the mean over the global batch is the
    sum of the losses times their shares w / W.

    Args:
        rank: rank of this process, which reads the batch.
        weights: weight of each microbatch, at least one.
        counted: counted unit, in words. Replicas have to count alike.
        total: contribution of these weights to W; None: their sum.
    """

    def __init__(
        self, rank: Rank, weights: Sequence[float], counted: str, total: float | None = None
    ) -> None:
        self._rank = rank
        self._weights = list(weights)
        self._counted = counted
        self._num_batches = num_batches(rank)
        self._work: _C.Work | None = None
        # Sums of this rank; after the exchange, of all replicas.
        self._total = math.fsum(self._weights) if total is None else float(total)
        code = zlib.crc32(counted.encode())
        self._sums = array("d", [self._total, len(self._weights), 1.0, code])
        self._num_microbatches = float(len(self._weights))
        self._num_readers = 1.0
        self._is_global = rank.comms.dp_cp_host is None

    @staticmethod
    def absent(rank: Rank) -> BatchWeights:
        """Makes the weights of a replica that has no batch any more (`smp.join`)."""
        absent = BatchWeights(rank, [], "")
        absent._sums = array("d", bytes(len(absent._sums) * absent._sums.itemsize))
        return absent

    def own_sums(self) -> list[float]:
        """Returns what this rank adds to the sums over the replicas."""
        return self._sums.tolist()

    def begin_exchange(self) -> None:
        """Begins the sum over the replicas, which `share` waits for, unless there are sums already.

        Collective over them.
        """
        group = self._rank.comms.dp_cp_host
        if group is not None and not self._is_global:
            self._work = group.all_reduce(torch.frombuffer(self._sums, dtype=torch.float64))

    def finish_exchange(self) -> None:
        """Waits for the sum over the replicas, if one was begun.

        Raises:
            ValueError: replicas count different things.
            RuntimeError: the exchange did not end, or another rank failed.
        """
        if self._work is None:
            return
        self._work.wait(self._rank.timeout_s)
        self._work = None
        self.take_sums(self._sums)

    def take_sums(self, sums: Sequence[float]) -> None:
        """Takes the sums over the replicas of what each has by `own_sums`.

        Raises:
            ValueError: replicas count different things.
        """
        self._total, self._num_microbatches, self._num_readers, code = sums
        self._is_global = True
        if self._weights and code != self._num_readers * zlib.crc32(self._counted.encode()):
            raise ValueError(
                f"{_C.rank_prefix()}the weights of this step's microbatches count {self._counted} "
                "here and something else on another replica; give all replicas batches with the "
                "same arguments, or say what counts with @smp.step(weight=...)"
            )

    def counts_nothing(self, mb: int) -> bool:
        """Returns whether a microbatch has weight 0, such as one whose labels are all ignored."""
        return self._weights[mb] == 0

    def share(self, mb: int) -> float:
        """Returns the part of the mean over all batches that a microbatch's loss makes up.

        Replicas that have run out of batches count as if their loss was zero.

        Raises:
            ValueError, RuntimeError: see `finish_exchange`.
        """
        self.finish_exchange()
        if self._total > 0:
            part = self._weights[mb] / self._total
        else:
            part = 1.0 / self._num_microbatches  # as in one process: a mean over nothing
        # All ranks with a common batch have counted it.
        return part * (self._num_readers / self._num_batches)

    def output_weight(self, mb: int) -> float:
        """Returns the weight of a microbatch's outputs in their mean over the microbatches.

        In training the mean of these means over the replicas is the mean over the global batch. In
        evaluation, where replicas may run different numbers of steps, it covers this rank's batch.

        Raises:
            ValueError, RuntimeError: see `finish_exchange`.
        """
        count = len(self._weights)
        if self._is_global or self._work is not None:
            return self.share(mb) * self._num_batches * count
        return self._weights[mb] * count / self._total if self._total > 0 else 1.0
