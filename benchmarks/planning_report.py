"""Measures how well predictions order layouts, and how far off they are. Pure arithmetic."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs that both order alike less those that they order differently, over all; in [-1, 1].

    Raises:
        ValueError: there are not two values, or not as many in both.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"expected two rows of equal length, got {len(first)} and {len(second)}")
    pairs = list(itertools.combinations(zip(first, second, strict=True), 2))
    return sum(_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in pairs) / len(pairs)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios of predicted and measured figures of one layout.

    Args:
        result: a line with `median_ms`, `predicted_ms`, `pp_ranks` and `peak_mb` by global rank,
            `estimate_mb` by pipeline rank, `plan_mb` of the fullest rank.
    """
    by_rank = [
        result["estimate_mb"][pp_rank] / peak
        for pp_rank, peak in zip(result["pp_ranks"], result["peak_mb"], strict=True)
    ]
    most = max(result["peak_mb"])
    return {
        "time_ratio": result["predicted_ms"] / result["median_ms"],
        "rank_ratios": by_rank,
        "estimate_ratio": max(result["estimate_mb"]) / most,
        "plan_ratio": result["plan_mb"] / most,
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all layouts; results have what `compared` takes and gives."""
    predicted = [result["predicted_ms"] for result in results]
    ratios = {
        "memory": [(r["estimate_ratio"], r["contender"]) for r in results],
        "plan_memory": [(r["plan_ratio"], r["contender"]) for r in results],
        "rank_memory": [(ratio, r["contender"]) for r in results for ratio in r["rank_ratios"]],
    }
    found: dict[str, Any] = {
        "layouts": len(results),
        "tau": kendall_tau(predicted, [result["median_ms"] for result in results]),
        "tau_of_minima": kendall_tau(predicted, [result["min_ms"] for result in results]),
        "tau_of_cpu": kendall_tau(predicted, [result["cpu_s"] for result in results]),
        "time_ratio_median": statistics.median(result["time_ratio"] for result in results),
        "time_ratio_min": min(result["time_ratio"] for result in results),
        "time_ratio_max": max(result["time_ratio"] for result in results),
    }
    for name, pairs in ratios.items():
        ratio, layout = max(pairs, key=lambda pair: abs(pair[0] - 1))
        found |= {f"{name}_error": abs(ratio - 1), f"{name}_error_of": layout}
    return found
