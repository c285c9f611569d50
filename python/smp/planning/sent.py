"""Counts the bytes that ranks send in a step, by purpose."""

from __future__ import annotations

from collections.abc import Sequence

from smp.planning.layout import Layout
from smp.planning.stages import Stage
from smp.planning.step_time import Grid


def sent_bytes(
    stages: Sequence[Stage], layout: Layout, grid: Grid, precision: str
) -> dict[str, float]:
    """Returns the bytes of the rank that sends most in a step, by purpose."""
    width = 4 if precision == "fp32" else 2
    ranks: list[dict[str, float]] = [
        dict.fromkeys(("tensor", "experts", "gather", "reduce", "pipeline"), 0.0)
        for _ in range(layout.pp)
    ]
    rounds = layout.microbatches
    for position, stage in enumerate(stages):
        sent = ranks[stage.rank]
        elements = stage.elements(layout.shares)
        for part, count in stage.kinds:
            again = layout.checkpoints and part.is_layer
            units = (5 + 2 * again) if layout.in_memory else (4 + 2 * again)
            num_bytes = layout.microbatch * part.input_bytes
            pairs = count * part.num_products * rounds
            if layout.spreads_experts:
                mixtures = count * part.num_mixtures * rounds
                pairs -= mixtures
                rows = 2 * grid.apart * num_bytes / layout.tp + grid.tensor.sent_bytes(num_bytes)
                sent["experts"] += (2 + again) * mixtures * rows
            sent["tensor"] += units * pairs * grid.tensor.sent_bytes(num_bytes)
        if layout.shards_parameters and layout.shard > 1:
            sent["gather"] += 2 * rounds * grid.shard.sent_bytes(width * elements)
            times = rounds if layout.pp == 1 else 1
            sent["reduce"] += times * grid.shard.sent_bytes(4 * elements)
        elif layout.shard > 1:
            sent["gather"] += grid.shard.sent_bytes(width * elements)
            sent["reduce"] += grid.shard.sent_bytes(4 * elements)
        sent["reduce"] += 2 * grid.replicas.sent_bytes(4 * elements / layout.shard)
        if position > 0 and stage.rank != stages[position - 1].rank:
            num_bytes = rounds * layout.microbatch * stage.input_bytes
            sent["pipeline"] += num_bytes
            ranks[stages[position - 1].rank]["pipeline"] += num_bytes
    return max(ranks, key=lambda sent: sum(sent.values()))
