"""Estimates a step: work by a roofline, exchanges by rings, waiting by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smp.planning.hardware import Hardware
from smp.planning.layout import Layout, Reach, reach
from smp.planning.passing import Cores, StageTime, simulated_s
from smp.planning.profile import Part
from smp.planning.stages import Stage
from smp.planning.tensor_split import Shares

_UPDATE_BYTES = 34  # memory traffic per element: norm, Adam with FP32 masters, 16-bit copies
_SUM_BYTES = 8  # memory traffic per element: a sum of gradients, read and written


@dataclass(frozen=True)
class Grid:
    """The groups of ranks of a layout.

    Attributes:
        tensor: ranks that split layers together.
        shard: ranks that hold one copy of the state together.
        replicas: ranks that hold the same part of the state.
        next_stage: a rank and the one with the next part of the model.
        apart: mean number of other ranks that a token is sent to, if experts are spread.
    """

    tensor: Reach
    shard: Reach
    replicas: Reach
    next_stage: Reach
    apart: float = 0.0

    @classmethod
    def of(cls, layout: Layout, per_host: int, hardware: Hardware, apart: float = 0.0) -> Grid:
        """Returns the groups of a layout."""

        def along(axis: str, size: int) -> Reach:
            return reach(layout, axis, size, per_host, hardware)

        replicas = along("D", layout.rdp)
        return cls(
            along("T", layout.tp),
            along("D", layout.shard),
            Reach(layout.rdp // layout.shard, replicas.crosses, replicas.link),
            along("P", min(2, layout.pp)),
            apart,
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        total: seconds of the whole step.
        pipeline: seconds until the last microbatch is done.
        bubble: share of the step in which the busiest rank waits for others.
        reduced: seconds of gradient sums and parameter gathers that nothing hides.
        updated: seconds of the optimizer.
        stages: times of one microbatch, by stage.
        shared: extra seconds because ranks share cores.
        busiest: index of the stage with the most work.
    """

    total: float
    pipeline: float
    bubble: float
    reduced: float
    updated: float
    stages: tuple[StageTime, ...]
    shared: float
    busiest: int


def stage_time(
    stage: Stage, layout: Layout, grid: Grid, hardware: Hardware, precision: str
) -> StageTime:
    """Returns the seconds of one microbatch in a stage."""
    rate = hardware.rate(precision)
    shares, samples = layout.shares, layout.microbatch
    forward = backward = exchanged_forward = exchanged_backward = again = copies = 0.0
    for part, count in stage.kinds:
        many = count * samples
        own_forward = many * _shared(part.split_forward, part.whole_forward, shares) / rate
        own_backward = many * _shared(part.split_backward, part.whole_backward, shares) / rate
        ahead, back = (
            count * seconds for seconds in _exchanges(part, layout, grid.tensor, grid.apart)
        )
        forward += own_forward
        backward += own_backward
        exchanged_forward += ahead
        exchanged_backward += back
        if layout.checkpoints and part.is_layer:
            again += own_forward
            exchanged_backward += ahead
            if layout.offload:
                num_bytes = many * part.input_bytes * shares.whole
                copies += num_bytes / hardware.host_copy_bytes_per_s
    # Each microbatch's gradients are read and added to their sums.
    elements = stage.elements(shares)
    width = 4 if precision == "fp32" else 2
    added = (_SUM_BYTES + width) * elements / hardware.memory_bytes_per_s
    overheads = hardware.overheads
    if overheads is not None:
        added = overheads.microbatch_element_s * elements
        called = overheads.call_s * stage.calls / 2 + overheads.microbatch_s / 2
        forward += called
        backward += called
    backward += added
    gather = _gather_s(stage, layout, grid, precision)
    scatter = _scatter_s(stage, layout, grid)
    ahead = forward + exchanged_forward
    back = backward + exchanged_backward + again
    # A core cannot compute while it copies.
    beside = 0.0 if hardware.at_once else 1.0
    late_ahead, late_back = (
        max(0.0, num - beside * work) for num, work in ((gather, ahead), (gather + scatter, back))
    )
    copied_ahead, copied_back = (max(0.0, copies - beside * work) for work in (ahead, back))
    late = late_ahead + late_back
    late_copies = copied_ahead + copied_back
    # The backward of a checkpoint is not cut in two.
    weight = 0.0 if layout.checkpoints else backward / 2
    return StageTime(
        forward=ahead + max(late_ahead, copied_ahead),
        backward=back - weight + max(late_back, copied_back),
        weight=weight,
        exchanged=exchanged_forward + exchanged_backward,
        gathered=late,
        copied=late_copies,
        again=again,
    )


def _shared(split: float, whole: float, shares: Shares) -> float:
    return split * shares.split + whole * shares.whole


def _exchanges(part: Part, layout: Layout, group: Reach, apart: float) -> tuple[float, float]:
    """Returns the seconds of the exchanges of a layer in its forward and backward.

    Args:
        apart: see `Grid`.
    """
    if group.size == 1 or part.num_products == 0:
        return 0.0, 0.0
    num_bytes = layout.microbatch * part.input_bytes
    pairs = part.num_products
    routed = 0.0
    if layout.spreads_experts:
        pairs -= part.num_mixtures
        sent = apart * num_bytes / group.size  # of a rank's own part of the tokens
        # Tokens are sent and returned, and the result is gathered: all ranks have the same tokens.
        routed = part.num_mixtures * (2 * group.exchange_s(sent) + group.gather_s(num_bytes))
    if layout.in_memory:  # gathered and scattered, and gathered again for gradients of weights
        one = group.gather_s(num_bytes)
        return 2 * pairs * one + routed, 3 * pairs * one + routed
    one = group.all_reduce_s(num_bytes)
    return pairs * one + routed, pairs * one + routed


def _gather_s(stage: Stage, layout: Layout, grid: Grid, precision: str) -> float:
    if not layout.shards_parameters or layout.shard == 1:
        return 0.0
    return grid.shard.gather_s((4 if precision == "fp32" else 2) * stage.elements(layout.shares))


def _scatter_s(stage: Stage, layout: Layout, grid: Grid) -> float:
    """Returns the seconds of reducing gradients per microbatch: 0 with a pipeline."""
    if not layout.shards_parameters or layout.shard == 1 or layout.pp > 1:
        return 0.0
    return grid.shard.gather_s(4 * stage.elements(layout.shares))


def step_time(
    stages: Sequence[Stage],
    layout: Layout,
    grid: Grid,
    hardware: Hardware,
    precision: str,
    per_host: int,
    simulated: bool = True,
) -> StepTime:
    """Estimates the seconds of a step.

    Args:
        stages: stages in the order of the chain; stage i is on rank i modulo pp, a tail on rank 0.
        layout: layout of the run.
        grid: groups of ranks of the layout.
        hardware: figures of the devices.
        precision: precision of products.
        per_host: devices of a host.
        simulated: run the schedule; otherwise return a lower bound, for a search.
    """
    different = {(stage.kinds, stage.calls): stage for stage in stages}
    known = {
        kind: stage_time(stage, layout, grid, hardware, precision)
        for kind, stage in different.items()
    }
    times = [known[stage.kinds, stage.calls] for stage in stages]
    by_rank = [0.0] * layout.pp
    for stage, time in zip(stages, times, strict=True):
        by_rank[stage.rank] += time.total
    most = max(by_rank)
    busiest_rank = by_rank.index(most)
    if layout.pp == 1:
        pipeline = layout.microbatches * most
    elif simulated:
        pipeline = simulated_s(stages, times, layout, grid.next_stage.link)
    else:
        pipeline = layout.microbatches * most + (sum(by_rank) - most) / layout.chunks
    one_update = _UPDATE_BYTES / hardware.memory_bytes_per_s
    if hardware.overheads is not None:
        one_update = hardware.overheads.update_element_s
    updated = one_update * max(_by_rank(stages, layout)) / layout.shard
    hides = hardware.at_once == 0
    reduced = _reduced_s(
        [(stage, known[kinds]) for kinds, stage in different.items()],
        layout,
        grid,
        precision,
        hides,
    )
    total = pipeline + reduced + updated
    shared = 0.0
    if hardware.at_once:
        cores = Cores.of(hardware, layout, per_host)
        replicas = layout.tp * layout.rdp  # ranks that do the same at the same time
        if layout.pp == 1:
            shared = (cores.pace(replicas) - 1) * pipeline
        elif simulated:
            shared = cores.stretch(stages, times, layout, grid.next_stage.link) * pipeline
        else:
            shared = max(0.0, replicas * layout.microbatches * sum(by_rank) / cores.num - pipeline)
        shared += (cores.crowding(layout) - 1) * (pipeline + shared)
        shared += (cores.pace(layout.num_ranks) - 1) * (reduced + updated)
        total += shared
    return StepTime(
        total=total,
        pipeline=pipeline,
        bubble=max(0.0, 1 - layout.microbatches * most / total),
        reduced=reduced,
        updated=updated,
        stages=tuple(times),
        shared=shared,
        busiest=next(i for i, stage in enumerate(stages) if stage.rank == busiest_rank),
    )


def _by_rank(stages: Sequence[Stage], layout: Layout) -> list[float]:
    elements = [0.0] * layout.pp
    for stage in stages:
        elements[stage.rank] += stage.elements(layout.shares)
    return elements


def _reduced_s(
    stages: Sequence[tuple[Stage, StageTime]],
    layout: Layout,
    grid: Grid,
    precision: str,
    hides: bool,
) -> float:
    """Returns the seconds of gradient sums and parameter gathers that a backward does not hide.

    Args:
        stages: the different stages, with their times.
        hides: the last backward runs at the same time.
    """
    late = 0.0
    for stage, time in stages:
        elements = stage.elements(layout.shares)
        if layout.shards_parameters and layout.shard > 1:
            seconds = grid.shard.gather_s(4 * elements) if layout.pp > 1 else 0.0
            seconds += grid.replicas.all_reduce_s(4 * elements / layout.shard)
        elif layout.shard > 1:
            width = 4 if precision == "fp32" else 2
            seconds = grid.shard.gather_s((4 + width) * elements)
            seconds += grid.replicas.all_reduce_s(4 * elements / layout.shard)
        else:
            seconds = grid.replicas.all_reduce_s(4 * elements)
        late = max(late, seconds - (time.backward + time.weight if hides else 0.0))
    return max(0.0, late)
