"""Explains a partition: its candidates, what bounds it, costs of modules, and what-ifs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import smp._C as _C
from smp.partition import partition_file
from smp.partition.decide import partition_options
from smp.partition.decision import Decision
from smp.partition.fastest import StageTimes, stage_times, step_ratio
from smp.planning.run_cuts import Run


@dataclass(frozen=True)
class ModuleCosts:
    """Costs of a module with all modules below it, on one rank.

    Attributes:
        name: qualified name.
        pp_rank: pipeline rank of the module.
        param_bytes: bytes of its parameters, shared ones once.
        activation_bytes: bytes kept for the backward of one microbatch.
        compute_share: share of all arithmetic, in [0, 1].
    """

    name: str
    pp_rank: int
    param_bytes: int
    activation_bytes: int
    compute_share: float


@dataclass(frozen=True)
class Bounds:
    """The bounds of a step; times are over those of ranks that never wait and are alike.

    Attributes:
        step_ratio: ratio of the partition.
        even_ratio: ratio of stages that all take the same: only filling and draining costs.
        largest_rank: rank with the most work.
        largest_share: time of that rank over the mean of ranks.
        memory_rank: rank that holds most.
        memory_bytes: bytes that this rank holds.
        limit_bytes: bytes that it may hold; 0: no limit.
    """

    step_ratio: float | None
    even_ratio: float | None
    largest_rank: int
    largest_share: float
    memory_rank: int
    memory_bytes: float
    limit_bytes: int


def evaluated(
    decision: Decision, run: Run, assignment: _C.Assignment | None = None
) -> tuple[_C.Evaluation, _C.PartitionOptions]:
    """Returns the costs of a partition, or of another assignment, and the options of both."""
    options = decision.options
    if options is None:
        options = partition_options(
            run.config, decision.num_partitions, decision.num_chunks, speeds=run.speeds
        )
    tree = decision.index.tree
    return _C.evaluate_partition(tree, assignment or decision.assignment, options), options


def times_of(
    decision: Decision, evaluation: _C.Evaluation, options: _C.PartitionOptions
) -> list[StageTimes]:
    """Returns the times of the stages of a partition; an empty list where no costs are known."""
    return stage_times(evaluation, decision.index.tree.compute_per_byte, options)


def module_costs(decision: Decision) -> list[ModuleCosts]:
    """Returns the largest modules that are whole on one rank, in the order of the model."""
    tree, parents = decision.index.tree, decision.index.parents
    total = sum(tree.compute(idx) for idx in range(len(tree)))
    idx_of = {names[0]: idx for idx, names in enumerate(decision.index.names)}
    found = []
    for name, _ in partition_file.top_most(decision):
        top = idx_of[name]
        below = {top}
        for idx in range(top + 1, len(tree)):
            if parents[idx] in below:
                below.add(idx)
        found.append(
            ModuleCosts(
                name,
                decision.partition_idxs[top],
                sum(tree.param_bytes(idx) for idx in below),
                sum(tree.activation_bytes(idx) for idx in below),
                sum(tree.compute(idx) for idx in below) / total if total else 0.0,
            )
        )
    return found


def bounds_of(decision: Decision, run: Run) -> Bounds:
    """Returns what bounds the time and the memory of a partition."""
    size, tree = decision.num_partitions, decision.index.tree
    evaluation, options = evaluated(decision, run)
    times, shape = times_of(decision, evaluation, options), run.layout.shape
    by_rank = [
        sum(t.forward + t.backward + t.weight for t in times if t.pp_rank == rank)
        for rank in range(size)
    ]
    largest = max(range(size), key=by_rank.__getitem__)
    mean = sum(by_rank) / size
    limits = options.memory_limits or [0] * size
    holds = max(range(size), key=lambda rank: evaluation.memory_bytes[rank] / max(1, limits[rank]))
    even = None
    if times:
        stage = 1000 / len(times)
        costs = [_C.StageCost(t.pp_rank, stage / 3, stage / 3, stage / 3, 0) for t in times]
        step_ms = _C.simulate_policy(
            costs, [], shape.microbatches, shape.active, shape.policy
        ).makespan_ms
        even = step_ms * size / (1000 * shape.microbatches)
    return Bounds(
        step_ratio(evaluation, tree.compute_per_byte, options, shape),
        even,
        largest,
        by_rank[largest] / mean if mean else 1.0,
        holds,
        evaluation.memory_bytes[holds],
        limits[holds],
    )


def what_if(decision: Decision, moves: Mapping[str, int], run: Run) -> Decision:
    """Returns the partition with modules, and all modules below them, on other ranks.

    Args:
        decision: the original partition.
        moves: rank by qualified name, applied in this order.
        run: run whose schedule is simulated.

    Raises:
        ValueError: there is no such module or rank, or it cannot be there.
    """
    assignment, tree = decision.assignment, decision.index.tree
    for name, pp_rank in moves.items():
        if name not in decision.partition_of_name or not name:
            raise ValueError(f"the model has no module {name!r} that could be moved")
        if not 0 <= pp_rank < decision.num_partitions:
            raise ValueError(f"{name}={pp_rank}: partitions are 0 to {decision.num_partitions - 1}")
        idx = next(i for i, names in enumerate(decision.index.names) if name in names)
        try:
            assignment = _C.move_in_partition(tree, assignment, idx, pp_rank)
        except ValueError as error:
            raise ValueError(f"{name}={pp_rank} is not possible: {error}") from None
    evaluation, options = evaluated(decision, run, assignment)
    ratio = step_ratio(evaluation, tree.compute_per_byte, options, run.layout.shape)
    return replace(Decision.of(decision.index, assignment, options), step_ratio=ratio)


def bounds_in_words(bounds: Bounds, microbatches: int) -> list[str]:
    """Returns lines of text that explain what bounds a step."""
    lines = []
    if bounds.step_ratio is not None and bounds.even_ratio is not None:
        waits = max(0.0, bounds.step_ratio - bounds.largest_share)
        lines.append(
            f"A step takes {bounds.step_ratio:.3f} of the time of ranks that never wait and are "
            f"alike, by estimate; stages that all take the same would take {bounds.even_ratio:.3f} "
            f"with {microbatches} microbatches."
        )
        lines.append(
            f"Rank {bounds.largest_rank} has most to do: it works for {bounds.largest_share:.3f} "
            f"and waits for {waits:.3f}."
        )
        lines.append(
            "So waiting bounds the step: more microbatches, or another schedule, help more than "
            "another partition."
            if waits > bounds.largest_share - 1
            else "So the work of that rank bounds the step: a partition that takes some of it away "
            "helps, if modules can be cut there and memory allows it."
        )
    limit = ""
    if bounds.limit_bytes:
        limit = f", {100 * bounds.memory_bytes / bounds.limit_bytes:.0f} % of the limit"
    lines.append(
        f"Rank {bounds.memory_rank} holds most: {bounds.memory_bytes / 2**20:.4g} MiB by "
        f"estimate{limit}."
    )
    return lines
