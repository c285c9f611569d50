"""A partition with the times that ranks were recorded with in the place of FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import smp._C as _C
from smp.config.schema import Config
from smp.partition.costs import ModuleCost, Trace
from smp.partition.decision import Decision
from smp.partition.fastest import step_ratio
from smp.partition.tree import build_tree
from smp.planning.reasons import options_of, shape_of

_ROUNDS = 8  # work that is left where its data are is scaled with the module that has the code


def with_recorded(
    decision: Decision,
    trace: Trace,
    config: Config,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
) -> Decision:
    """The same partition; modules of a rank cost what that rank was recorded with.

    FLOPs still say how the time of a rank is divided among its modules. All work together stays
    what it was, so shares and loads can be compared.

    Args:
        decision: whose partition was recorded.
        trace: by which it was decided.
        config: whose schedule counts.
        forward_ms, backward_ms: of one microbatch, by pipeline rank.

    Raises:
        ValueError: there are not as many ranks, or a rank that has no work by estimate took time.
    """
    size, options = decision.num_partitions, options_of(decision, config)
    if len(forward_ms) != size or len(backward_ms) != size:
        raise ValueError(f"{len(forward_ms)} pipeline ranks were recorded, expected {size}")
    total_ms = sum(forward_ms) + sum(backward_ms)
    total = sum(decision.index.tree.compute(idx) for idx in range(len(decision.index.tree)))
    wanted = [[total * t / total_ms for t in times] for times in (forward_ms, backward_ms)]
    for _ in range(_ROUNDS):
        found = _work(decision, options)
        factors = [
            [_ratio(w, f, rank) for rank, (w, f) in enumerate(zip(many, few, strict=True))]
            for many, few in zip(wanted, found, strict=True)
        ]
        trace = _scaled(trace, decision, *factors)
        index = build_tree(decision.modules[0], trace)
        decision = Decision.of(index, decision.assignment, options, decision.decided_by)
    evaluation = _C.evaluate_partition(decision.index.tree, decision.assignment, options)
    per_byte = decision.index.tree.compute_per_byte
    return replace(decision, step_ratio=step_ratio(evaluation, per_byte, size, shape_of(config)))


def _work(decision: Decision, options: _C.PartitionOptions) -> tuple[list[float], list[float]]:
    """Of forwards and of backwards, by pipeline rank."""
    evaluation = _C.evaluate_partition(decision.index.tree, decision.assignment, options)
    size = decision.num_partitions
    forward, backward = [0.0] * size, [0.0] * size
    for stage, compute in enumerate(evaluation.compute):
        forward[stage % size] += evaluation.forward[stage]
        backward[stage % size] += compute - evaluation.forward[stage]
    return forward, backward


def _ratio(wanted: float, found: float, rank: int) -> float:
    if found <= 0 < wanted:
        raise ValueError(f"pipeline rank {rank} took time, and has no work by estimate")
    return wanted / found if found > 0 else 1.0


def _scaled(
    trace: Trace, decision: Decision, forward: Sequence[float], backward: Sequence[float]
) -> Trace:
    ranks = [decision.partition_of[module] for module in trace.modules]
    costs = tuple(
        replace(
            cost,
            forward_flops=cost.forward_flops * forward[rank],
            backward_flops=cost.backward_flops * backward[rank],
        )
        for cost, rank in zip(trace.costs, ranks, strict=True)
    )
    grown = [_grown(*pair) for pair in zip(trace.costs, costs, strict=True)]
    values = tuple(replace(v, flops=v.flops * grown[v.producer]) for v in trace.values)
    return replace(trace, costs=costs, values=values)


def _grown(before: ModuleCost, after: ModuleCost) -> float:
    return after.compute / before.compute if before.compute else 1.0
