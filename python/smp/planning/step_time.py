"""How long a step takes: work by a roofline, exchanges by rings, waiting by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import smp._C as _C
from smp.partition.fastest import StepShape, simulated_step_ms
from smp.planning.hardware import Hardware
from smp.planning.layout import Layout, Reach, reach
from smp.planning.profile import Part
from smp.planning.stages import Stage
from smp.planning.tensor_split import Shares

_UPDATE_BYTES = 34  # of memory, per element: norm, Adam with FP32 masters, 16-bit copies


@dataclass(frozen=True)
class Grid:
    """Groups of a layout.

    Attributes:
        tensor: ranks that split layers together.
        shard: that hold one copy of the state together.
        replicas: that hold the same part of it.
        next_stage: a rank and the one with the next part of the model.
    """

    tensor: Reach
    shard: Reach
    replicas: Reach
    next_stage: Reach

    @classmethod
    def of(cls, layout: Layout, per_host: int, hardware: Hardware) -> Grid:
        """The groups of a layout."""

        def along(axis: str, size: int) -> Reach:
            return reach(layout, axis, size, per_host, hardware)

        replicas = along("D", layout.rdp)
        return cls(
            along("T", layout.tp),
            along("D", layout.shard),
            Reach(layout.rdp // layout.shard, replicas.crosses, replicas.link),
            along("P", min(2, layout.pp)),
        )


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage.

    Attributes:
        forward, backward, weight: of the three kinds of work; exchanges that are waited for, and a
            second forward, are in them.
        exchanged: of these, for split layers.
        gathered: of these, for parameters that did not come in time.
        copied: of these, for activations that go to the host and come back.
        again: of these, the second forward.
    """

    forward: float
    backward: float
    weight: float
    exchanged: float
    gathered: float
    copied: float
    again: float

    @property
    def total(self) -> float:
        """Of a microbatch."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        total: of the step.
        pipeline: until the last microbatch is done.
        bubble: share of the step in which the busiest rank waits for others.
        reduced: sums of gradients and gathers of parameters that nothing hides.
        updated: of the optimizer.
        stages: by stage.
        shared: the least that devices need that share cores; 0 where none do.
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
    """Seconds of one microbatch in a stage."""
    rate = hardware.rate(precision)
    shares, samples = layout.shares, layout.microbatch
    forward = backward = exchanged_forward = exchanged_backward = again = copies = 0.0
    for part, count in stage.kinds:
        many = count * samples
        own_forward = many * _shared(part.split_forward, part.whole_forward, shares) / rate
        own_backward = many * _shared(part.split_backward, part.whole_backward, shares) / rate
        ahead, back = (count * seconds for seconds in _exchanges(part, layout, grid.tensor))
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
    gather = _gather_s(stage, layout, grid, precision)
    scatter = _scatter_s(stage, layout, grid)
    ahead = forward + exchanged_forward
    back = backward + exchanged_backward + again
    late = max(0.0, gather - ahead) + max(0.0, gather + scatter - back)
    late_copies = max(0.0, copies - ahead) + max(0.0, copies - back)
    # The backward of a checkpoint is not cut in two.
    weight = 0.0 if layout.checkpoints else backward / 2
    return StageTime(
        forward=ahead + max(0.0, gather - ahead, copies - ahead),
        backward=back - weight + max(0.0, gather + scatter - back, copies - back),
        weight=weight,
        exchanged=exchanged_forward + exchanged_backward,
        gathered=late,
        copied=late_copies,
        again=again,
    )


def _shared(split: float, whole: float, shares: Shares) -> float:
    return split * shares.split + whole * shares.whole


def _exchanges(part: Part, layout: Layout, group: Reach) -> tuple[float, float]:
    """Seconds of the exchanges of a layer in its forward and backward."""
    if group.size == 1 or part.num_products == 0:
        return 0.0, 0.0
    num_bytes = layout.microbatch * part.input_bytes
    pairs = part.num_products
    if layout.in_memory:  # gathered and scattered, and gathered again for gradients of weights
        one = group.gather_s(num_bytes)
        return 2 * pairs * one, 3 * pairs * one
    one = group.all_reduce_s(num_bytes)
    return pairs * one, pairs * one


def _gather_s(stage: Stage, layout: Layout, grid: Grid, precision: str) -> float:
    if not layout.shards_parameters or layout.shard == 1:
        return 0.0
    return grid.shard.gather_s((4 if precision == "fp32" else 2) * stage.elements(layout.shares))


def _scatter_s(stage: Stage, layout: Layout, grid: Grid) -> float:
    """Without a pipeline gradients are reduced with each microbatch."""
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
    """Seconds of a step.

    Args:
        stages: in the order of the chain; stage i is on rank i modulo pp, a tail on rank 0.
        layout: of the run.
        grid: its groups.
        hardware: of the devices.
        precision: of products.
        per_host: devices of a host.
        simulated: run the schedule; otherwise a bound from below, for a search.
    """
    known: dict[object, StageTime] = {}
    for stage in stages:
        if stage.kinds not in known:
            known[stage.kinds] = stage_time(stage, layout, grid, hardware, precision)
    times = [known[stage.kinds] for stage in stages]
    by_rank = [0.0] * layout.pp
    for stage, time in zip(stages, times, strict=True):
        by_rank[stage.rank] += time.total
    most = max(by_rank)
    busiest_rank = by_rank.index(most)
    if layout.pp == 1:
        pipeline = layout.microbatches * most
    elif simulated:
        pipeline = _simulated_s(stages, times, layout, grid)
    else:
        pipeline = layout.microbatches * most + (sum(by_rank) - most) / layout.chunks
    updated = max(
        _UPDATE_BYTES * elements / layout.shard / hardware.memory_bytes_per_s
        for elements in _by_rank(stages, layout)
    )
    reduced = _reduced_s(stages, times, layout, grid, precision)
    shared = 0.0
    total = pipeline + reduced + updated
    if hardware.at_once and per_host > hardware.at_once:
        ranks = layout.tp * layout.rdp
        work = ranks * (layout.microbatches * sum(by_rank) + layout.pp * (updated + reduced))
        hosts = -(-layout.num_ranks // per_host)
        shared = work / (hardware.at_once * hosts)
        total = max(total, shared)
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


def _simulated_s(
    stages: Sequence[Stage], times: Sequence[StageTime], layout: Layout, grid: Grid
) -> float:
    costs = [
        _C.StageCost(stage.rank, 1e3 * t.forward, 1e3 * t.backward, 1e3 * t.weight, 0)
        for stage, t in zip(stages, times, strict=True)
    ]
    link = grid.next_stage.link
    boundaries = [
        _C.BoundaryCost(
            1e3 * link.latency_s,
            1e3 / link.bytes_per_s,
            int(layout.microbatch * stage.input_bytes),
            int(layout.microbatch * stage.input_bytes),
        )
        for stage in stages[1:]
    ]
    shape = StepShape(layout.schedule, layout.microbatches, layout.active)
    return simulated_step_ms(costs, boundaries, layout.pp, shape) / 1e3


def _reduced_s(
    stages: Sequence[Stage],
    times: Sequence[StageTime],
    layout: Layout,
    grid: Grid,
    precision: str,
) -> float:
    """Seconds in which gradients are summed and updated parameters gathered, beyond a backward."""
    late = 0.0
    for stage, time in zip(stages, times, strict=True):
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
        late = max(late, seconds - time.backward - time.weight)
    return max(0.0, late)


def sent_bytes(
    stages: Sequence[Stage], layout: Layout, grid: Grid, precision: str
) -> dict[str, float]:
    """Bytes that the rank which sends most sends in a step, by what they are for."""
    width = 4 if precision == "fp32" else 2
    ranks: list[dict[str, float]] = [
        dict.fromkeys(("tensor", "gather", "reduce", "pipeline"), 0.0) for _ in range(layout.pp)
    ]
    rounds = layout.microbatches
    for position, stage in enumerate(stages):
        sent = ranks[stage.rank]
        elements = stage.elements(layout.shares)
        for part, count in stage.kinds:
            again = layout.checkpoints and part.is_layer
            units = (5 + 2 * again) if layout.in_memory else (4 + 2 * again)
            pairs = count * part.num_products * rounds * units
            sent["tensor"] += pairs * grid.tensor.sent_bytes(layout.microbatch * part.input_bytes)
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
