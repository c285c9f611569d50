"""Estimates how long a step takes with a partition, by simulation with estimated costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import smp._C as _C

# Share of the forward in forward and backward, if a trace did not measure it.
_FORWARD_SHARE = 1 / 3
# Steps with more microbatches per rank are extrapolated: each further one takes the same time.
_SIMULATED_PER_RANK = 4
_FEWEST_SIMULATED = 8
# Steps that differ by less are equally fast, and memory decides.
_EQUAL = 1.002


@dataclass(frozen=True)
class StepShape:
    """The way of a step through the pipeline.

    Attributes:
        policy: name of the schedule.
        microbatches: number of microbatches of one step.
        active: largest number of microbatches in flight.
    """

    policy: str
    microbatches: int
    active: int

    @property
    def leads(self) -> tuple[float, ...]:
        """Returns the lead weights that the partitioner tries, see `partition_options`.

        A rank is busy with all microbatches, and idle until the first has arrived and after the
        last has left. If earlier ranks go on meanwhile, they may have more to do
        (1 / microbatches). If they wait for gradients, they may not (0).
        """
        if self.microbatches == 1:
            return (0.0,)
        return (0.0, 0.5 / self.microbatches, 1.0 / self.microbatches)


@dataclass(frozen=True)
class Candidate:
    """A partition that may be the fastest.

    Attributes:
        assignment: the partition.
        options: options that it was found by.
        memory_bytes: bytes on the rank that needs most.
        step_ratio: estimated time of a step over that of ranks which are always and equally busy;
            None where no costs are known.
        rank_bytes: bytes on each rank.
        excess_bytes: bytes above the limits of the options, of all ranks together.
    """

    assignment: _C.Assignment
    options: _C.PartitionOptions
    memory_bytes: float
    step_ratio: float | None
    rank_bytes: tuple[float, ...] = ()
    excess_bytes: float = 0.0


def candidate(
    tree: _C.ModuleTree,
    assignment: _C.Assignment,
    options: _C.PartitionOptions,
    shape: StepShape,
) -> Candidate:
    """Returns a partition with its memory and the time of its step."""
    evaluation = _C.evaluate_partition(tree, assignment, options)
    ratio = step_ratio(evaluation, tree.compute_per_byte, options, shape)
    needed = tuple(evaluation.memory_bytes)
    return Candidate(assignment, options, max(needed), ratio, needed, evaluation.excess_bytes)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the fastest of those that fit best; of equally fast ones that with least memory."""
    least = min(c.excess_bytes for c in candidates)
    candidates = [c for c in candidates if c.excess_bytes == least]
    ratios = [c.step_ratio for c in candidates if c.step_ratio is not None]
    if not ratios:
        return candidates[0]
    fast = [
        c for c in candidates if c.step_ratio is not None and c.step_ratio <= _EQUAL * min(ratios)
    ]
    return min(fast, key=lambda c: c.memory_bytes)


@dataclass(frozen=True)
class StageTimes:
    """The times of one microbatch in one stage.

    The whole model takes 1000 without a pipeline, on a device of the mean speed.

    Attributes:
        pp_rank: rank that runs the stage.
        forward: time of the forward.
        backward: time of the backward without gradients of weights.
        weight: time of the gradients of weights.
    """

    pp_rank: int
    forward: float
    backward: float
    weight: float


def stage_times(
    evaluation: _C.Evaluation, compute_per_byte: float, options: _C.PartitionOptions
) -> list[StageTimes]:
    """Returns compute and transfers of each stage, as the partitioner estimates them.

    Half of a backward is taken for gradients of weights.

    Args:
        evaluation: evaluation of the partition.
        compute_per_byte: cost of a byte over a boundary in the unit of compute.
        options: options of the partition, with the speeds of the ranks' devices.

    Returns:
        an empty list where no costs are known.
    """
    size = options.num_partitions
    speeds = options.speeds or [1.0] * size
    mean = sum(speeds) / size
    transfers = [compute_per_byte * num_bytes for num_bytes in evaluation.transfer_bytes]
    total = sum(evaluation.compute) + sum(transfers)
    if total <= 0 or sum(evaluation.compute) <= 0:
        return []
    known = sum(evaluation.forward) > 0
    stages = []
    for stage, transfer in enumerate(transfers):
        compute = evaluation.compute[stage]
        time = compute * mean / speeds[stage % size] + transfer
        share = evaluation.forward[stage] / compute if known and compute > 0 else _FORWARD_SHARE
        time_ms = 1000 * time / total
        half_ms = (1 - share) * time_ms / 2
        stages.append(StageTimes(stage % size, share * time_ms, half_ms, half_ms))
    return stages


def step_ratio(
    evaluation: _C.Evaluation,
    compute_per_byte: float,
    options: _C.PartitionOptions,
    shape: StepShape,
) -> float | None:
    """Returns the time of a step over the least possible: no rank waits, and all are equally busy.

    The result depends on the arguments alone, so all ranks find the same.

    Args:
        evaluation, compute_per_byte, options: see `stage_times`.
        shape: shape of the step.

    Returns:
        None where no costs are known.
    """
    times = stage_times(evaluation, compute_per_byte, options)
    if not times:
        return None
    stages = [_C.StageCost(t.pp_rank, t.forward, t.backward, t.weight, 0) for t in times]
    step_ms = simulated_step_ms(stages, [], options.num_partitions, shape)
    return step_ms * options.num_partitions / (1000 * shape.microbatches)


def simulated_step_ms(
    stages: Sequence[_C.StageCost],
    boundaries: Sequence[_C.BoundaryCost],
    num_partitions: int,
    shape: StepShape,
) -> float:
    """Returns the time of a step in ms; many microbatches are extrapolated from a few.

    Args:
        stages: stages of the chain, with the times of one microbatch.
        boundaries: boundaries between stages; empty if transfers take no time.
        num_partitions: number of pipeline ranks.
        shape: shape of the step.
    """
    most = max(_FEWEST_SIMULATED, _SIMULATED_PER_RANK * num_partitions)

    def simulated_ms(microbatches: int) -> float:
        active = min(shape.active, microbatches)
        return _C.simulate_policy(
            stages, boundaries, microbatches, active, shape.policy
        ).makespan_ms

    if shape.microbatches <= most:
        return simulated_ms(shape.microbatches)
    step_ms = simulated_ms(most)
    per_microbatch_ms = (step_ms - simulated_ms(most // 2)) / (most - most // 2)
    return step_ms + (shape.microbatches - most) * per_microbatch_ms
