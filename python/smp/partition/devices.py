"""Combines the devices of all ranks: speeds of pipeline ranks, and shares of a batch.

All replicas have the same partition, so a pipeline rank has a device in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import smp._C as _C


def replica_shares(speeds: Sequence[float], grid: _C.ProcessGrid) -> list[float]:
    """Returns the share of a step's samples that each replica gets, by its speed; their sum is 1.

    Ranks of a replica that compute parts of the same layers wait for the slowest of them. Its
    pipeline ranks have work by their speeds, so these are added.

    Args:
        speeds: speed of each rank's device, by global rank; empty: all are alike.
        grid: places of all ranks.
    """
    by_place = _slowest_by_place(speeds, grid)
    totals = [sum(own) for own in zip(*by_place, strict=True)]
    return [total / sum(totals) for total in totals]


def stage_speeds(speeds: Sequence[float], grid: _C.ProcessGrid) -> list[float]:
    """Returns the speed of each pipeline rank in its slowest replica, for a mean share of samples.

    Args:
        speeds, grid: see `replica_shares`.

    Returns:
        an empty list where all ranks are alike.
    """
    if len(set(speeds)) < 2:
        return []
    shares = replica_shares(speeds, grid)
    return [
        min(speed / (share * len(shares)) for speed, share in zip(own, shares, strict=True))
        for own in _slowest_by_place(speeds, grid)
    ]


def least_by_stage(values: Sequence[int], grid: _C.ProcessGrid) -> list[int]:
    """Returns the smallest of the values of the ranks of each pipeline rank, by global rank."""
    least = [values[0]] * grid.group_size("pp")
    seen: set[int] = set()
    for global_rank, value in enumerate(values):
        stage = grid.coordinates(global_rank).pp
        least[stage] = min(least[stage], value) if stage in seen else value
        seen.add(stage)
    return least


def samples_of_shares(num_samples: int, shares: Sequence[float]) -> list[int]:
    """Returns whole samples by shares: the largest remainders are rounded up, the first of equals.

    Args:
        num_samples: number of samples in all; at least one for each share.
        shares: positive shares whose sum is 1.

    Raises:
        ValueError: there are fewer samples than shares.
    """
    if num_samples < len(shares):
        raise ValueError(
            f"{num_samples} samples cannot be shared by {len(shares)} replicas; give each one at "
            "least"
        )
    exact = [num_samples * share for share in shares]
    counts = [max(1, math.floor(own + 1e-9)) for own in exact]
    while (left := num_samples - sum(counts)) != 0:
        sign = 1 if left > 0 else -1
        movable = [idx for idx, count in enumerate(counts) if count + sign >= 1]
        idx = max(movable, key=lambda idx: (sign * (exact[idx] - counts[idx]), -idx))
        counts[idx] += sign
    return counts


def _slowest_by_place(speeds: Sequence[float], grid: _C.ProcessGrid) -> list[list[float]]:
    """Returns the slowest speed by pipeline rank and replica."""
    num_replicas = grid.group_size("rdp")
    found = [[math.inf] * num_replicas for _ in range(grid.group_size("pp"))]
    for global_rank in range(grid.group_size("world")):
        place = grid.coordinates(global_rank)
        speed = speeds[global_rank] if speeds else 1.0
        found[place.pp][place.rdp] = min(found[place.pp][place.rdp], speed)
    return found
