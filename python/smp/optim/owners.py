"""Chooses the rank that updates each tensor whose parts lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: How far a rank may exceed an equal share of the work, so that fewer bytes are sent.
_SLACK = 1.1


@dataclass(frozen=True)
class Candidate:
    """A tensor that needs an owner.

    Attributes:
        shape: sizes of the whole tensor.
        itemsize: bytes of an element.
        held: number of its elements on each rank.
        owner: position of the rank that owns it already, or None.
    """

    shape: tuple[int, ...]
    itemsize: int
    held: tuple[int, ...]
    owner: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def cost(self) -> int:
        """Operations of an update by products of matrices, up to a factor.

        A tensor with more than two dims counts as a matrix of its first dim and all others.
        """
        numel = math.prod(self.shape)
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return numel * min(rows, numel // max(rows, 1))


def choose_owners(tensors: Sequence[Candidate], num_ranks: int) -> list[int]:
    """Returns the position of each tensor's owner; the same on all ranks.

    Tensors are placed in the order of their cost, each where the larger one of a rank's shares, of
    all costs and of all bytes, is least afterwards. Among ranks whose share stays near an equal
    one, the rank that holds most of the tensor gets it, since these elements need not be sent.

    Args:
        tensors: tensors in one order on all ranks; owners that they have stay.
        num_ranks: number of ranks.

    Source: largest first (R. Graham, Bounds on multiprocessing timing anomalies, 1969), with two
    loads.
    """
    costs, sizes = [0] * num_ranks, [0] * num_ranks
    total_cost = max(1, sum(tensor.cost for tensor in tensors))
    total_size = max(1, sum(tensor.num_bytes for tensor in tensors))
    owners = [0] * len(tensors)

    def give(idx: int, rank: int) -> None:
        owners[idx] = rank
        costs[rank] += tensors[idx].cost
        sizes[rank] += tensors[idx].num_bytes

    def load_with(tensor: Candidate, rank: int) -> float:
        cost, size = costs[rank] + tensor.cost, sizes[rank] + tensor.num_bytes
        return max(cost / total_cost, size / total_size)

    new = []
    for idx, tensor in enumerate(tensors):
        if tensor.owner is None:
            new.append(idx)
        else:
            give(idx, tensor.owner)
    new.sort(key=lambda idx: (-tensors[idx].cost, -tensors[idx].num_bytes, idx))
    for idx in new:
        tensor = tensors[idx]
        loads = [load_with(tensor, rank) for rank in range(num_ranks)]
        limit = max(min(loads), _SLACK / num_ranks)
        fitting = [rank for rank in range(num_ranks) if loads[rank] <= limit]
        give(idx, min(fitting, key=lambda rank: (-tensor.held[rank], loads[rank], rank)))
    return owners
