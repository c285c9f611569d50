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
    """

    assignment: _C.Assignment
    options: _C.PartitionOptions
    memory_bytes: float
    step_ratio: float | None


def candidate(
    tree: _C.ModuleTree,
    assignment: _C.Assignment,
    options: _C.PartitionOptions,
    shape: StepShape,
) -> Candidate:
    """Returns a partition with its memory and the time of its step."""
    evaluation = _C.evaluate_partition(tree, assignment, options)
    ratio = step_ratio(evaluation, tree.compute_per_byte, options.num_partitions, shape)
    return Candidate(assignment, options, max(evaluation.memory_bytes), ratio)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the fastest one; of equally fast ones the one with least memory, then the first."""
    ratios = [c.step_ratio for c in candidates if c.step_ratio is not None]
    if not ratios:
        return candidates[0]
    fast = [
        c for c in candidates if c.step_ratio is not None and c.step_ratio <= _EQUAL * min(ratios)
    ]
    return min(fast, key=lambda c: c.memory_bytes)


@dataclass(frozen=True)
class StageTimes:
    """The times of one microbatch in one stage; 1000 is the whole model without a pipeline.

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
    evaluation: _C.Evaluation, compute_per_byte: float, num_partitions: int
) -> list[StageTimes]:
    """Returns compute and transfers of each stage, as the partitioner estimates them.

    Half of a backward is taken for gradients of weights.

    Args:
        evaluation: evaluation of the partition.
        compute_per_byte: cost of a byte over a boundary in the unit of compute.
        num_partitions: number of pipeline ranks.

    Returns:
        an empty list where no costs are known.
    """
    times = [
        compute + compute_per_byte * num_bytes
        for compute, num_bytes in zip(evaluation.compute, evaluation.transfer_bytes, strict=True)
    ]
    total = sum(times)
    if total <= 0 or sum(evaluation.compute) <= 0:
        return []
    known = sum(evaluation.forward) > 0
    stages = []
    for stage, time in enumerate(times):
        compute = evaluation.compute[stage]
        share = evaluation.forward[stage] / compute if known and compute > 0 else _FORWARD_SHARE
        time_ms = 1000 * time / total
        half_ms = (1 - share) * time_ms / 2
        stages.append(StageTimes(stage % num_partitions, share * time_ms, half_ms, half_ms))
    return stages


def step_ratio(
    evaluation: _C.Evaluation, compute_per_byte: float, num_partitions: int, shape: StepShape
) -> float | None:
    """Returns the time of a step over the least possible: no rank waits, and all are equally busy.

    The result depends on the arguments alone, so all ranks find the same.

    Args:
        evaluation, compute_per_byte, num_partitions: see `stage_times`.
        shape: shape of the step.

    Returns:
        None where no costs are known.
    """
    times = stage_times(evaluation, compute_per_byte, num_partitions)
    if not times:
        return None
    stages = [_C.StageCost(t.pp_rank, t.forward, t.backward, t.weight, 0) for t in times]
    step_ms = simulated_step_ms(stages, [], num_partitions, shape)
    return step_ms * num_partitions / (1000 * shape.microbatches)


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
