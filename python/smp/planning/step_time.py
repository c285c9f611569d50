"""Estimates a step: work by a roofline, exchanges by rings, waiting by the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from smp.modules.state_bytes import moment_bytes
from smp.planning.groups import Cost, Grid
from smp.planning.hardware import Hardware
from smp.planning.layout import Layout
from smp.planning.passing import Cores, StageTime, simulated_s
from smp.planning.profile import Part
from smp.planning.stages import Stage

# Memory traffic per element: norm, Adam with FP32 masters, 16-bit copies; moments go both ways.
_UPDATE_BYTES = 18
_SUM_BYTES = 8  # memory traffic per element: a sum of gradients, read and written


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
        busiest: pipeline rank with the most work.
    """

    total: float
    pipeline: float
    bubble: float
    reduced: float
    updated: float
    stages: tuple[StageTime, ...]
    shared: float
    busiest: int


def stage_time(stage: Stage, layout: Layout, grid: Grid, hardware: Hardware) -> StageTime:
    """Returns the seconds of one microbatch in a stage."""
    rate = hardware.rate(layout.precision)
    forward = backward = again = copies = 0.0
    exchanged, returned = Cost(), Cost()
    for part, count in stage.kinds:
        many = count * layout.computed_samples
        own = many * part.forward.on(layout.shares) / rate
        forward += own
        backward += many * part.backward.on(layout.shares) / rate
        repeats = layout.repeats(part)
        ahead, back = exchanges(part, layout, grid)
        for cost in ahead.values():
            exchanged += cost * count
            if repeats:
                returned += cost * count
        for cost in back.values():
            returned += cost * count
        if repeats:
            again += own
            if layout.offload:
                num_bytes = many * part.input_bytes * layout.shares.whole
                copies += num_bytes / hardware.host_copy_bytes_per_s
        elif layout.offload == "all":
            copies += many * part.kept.on(layout.shares) / hardware.host_copy_bytes_per_s
    called, added = _overheads(stage, layout, hardware)
    forward += called
    backward += called + added
    gather, scatter = sharded_costs(stage, layout, grid)
    ahead_s = forward + exchanged.seconds
    back_s = backward + returned.seconds + again
    # A core cannot compute while it copies.
    beside = 0.0 if hardware.at_once else 1.0
    gathered_ahead = max(0.0, gather.seconds - beside * ahead_s)
    gathered_back = max(0.0, gather.seconds + scatter.seconds - beside * back_s)
    copied_ahead, copied_back = (max(0.0, copies - beside * work) for work in (ahead_s, back_s))
    # A backward with a checkpoint is not cut in two.
    weight = 0.0 if again else backward / 2
    return StageTime(
        forward=ahead_s + max(gathered_ahead, copied_ahead),
        backward=back_s - weight + max(gathered_back, copied_back),
        weight=weight,
        exchanged=exchanged.seconds + returned.seconds,
        gathered=gathered_ahead + gathered_back,
        copied=copied_ahead + copied_back,
        again=again,
    )


def _overheads(stage: Stage, layout: Layout, hardware: Hardware) -> tuple[float, float]:
    """Returns seconds of calls, in a forward or backward, and of adding gradients to their sums."""
    elements, overheads = stage.elements(layout.shares), hardware.overheads
    if overheads is None:
        return 0.0, (_SUM_BYTES + layout.width) * elements / hardware.memory_bytes_per_s
    called = overheads.call_s * stage.calls / 2 + overheads.microbatch_s / 2
    return called, overheads.microbatch_element_s * elements


def exchanges(part: Part, layout: Layout, grid: Grid) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Returns the costs of the exchanges of a part per microbatch: forward and backward.

    The keys are "tensor", "experts" for tokens on their way to experts and back, and "context".
    """
    ahead, back = _split_exchanges(part, layout, grid)
    shared = _context_exchanges(part, layout, grid)
    return {**ahead, **shared}, {**back, **shared}


def _context_exchanges(part: Part, layout: Layout, grid: Grid) -> dict[str, Cost]:
    """Returns the costs of a layer whose tokens ranks share, in either direction.

    Queries, keys and values go from parts of tokens to heads, and the result of attention goes back
    (Jacobs et al. 2023). Between pipeline ranks all ranks have all tokens.
    """
    group = grid.context
    if group.size == 1 or not part.is_layer:
        return {}
    own = layout.computed_samples * part.input_bytes * (group.size - 1) / group.size
    heads = own * layout.shares.split
    cost = group.exchange((1 + 2 * grid.sent_keys) * heads) + group.exchange(heads)
    if layout.pp > 1:
        cost += group.gather(layout.computed_samples * layout.cp * part.input_bytes)
    return {"context": cost}


def _split_exchanges(
    part: Part, layout: Layout, grid: Grid
) -> tuple[dict[str, Cost], dict[str, Cost]]:
    group = grid.tensor
    if group.size == 1 or part.num_products == 0:
        return {}, {}
    num_bytes = layout.microbatch * part.input_bytes
    pairs, routed = part.num_products, {}
    if layout.spreads_experts:
        pairs -= part.num_mixtures
        sent = grid.apart * num_bytes / group.size  # of a rank's own part of the tokens
        # Tokens are sent and returned, and the result is gathered: all ranks have the same tokens.
        one = group.exchange(sent) * 2 + group.gather(num_bytes)
        routed = {"experts": one * part.num_mixtures}
    one = group.gather(num_bytes) * pairs
    # Gathered and scattered, and gathered again for gradients of weights; or a sum, of two gathers.
    ahead, back = (2, 3) if layout.in_memory else (2, 2)
    return {"tensor": one * ahead, **routed}, {"tensor": one * back, **routed}


def sharded_costs(stage: Stage, layout: Layout, grid: Grid) -> tuple[Cost, Cost]:
    """Returns the costs of a gather of sharded parameters, and of the gradients of a microbatch.

    A pipeline reduces gradients once per step.
    """
    if not layout.cuts_parameters:
        return Cost(), Cost()
    elements = stage.elements(layout.shares)
    scatter = Cost() if layout.pp > 1 else grid.shard.gather(4 * elements)
    return grid.shard.gather(layout.width * elements), scatter


def step_costs(stage: Stage, layout: Layout, grid: Grid) -> tuple[Cost, Cost]:
    """Returns the costs of sums of gradients, and of gathers of parameters, once per step."""
    elements = stage.elements(layout.shares)
    reduced = grid.replicas.all_reduce(4 * elements / layout.shard)
    if layout.shard == 1 or (layout.shards_parameters and layout.pp == 1):
        return reduced, Cost()
    if layout.shards_parameters:
        return reduced + grid.shard.gather(4 * elements), Cost()
    # Gradients are scattered and parameters gathered in one ring.
    both, gathered = 4 + layout.width, layout.width / (4 + layout.width)
    ring = grid.shard.gather(both * elements)
    return reduced + ring * (1 - gathered), ring * gathered


def step_time(
    stages: Sequence[Stage],
    layout: Layout,
    grid: Grid,
    hardware: Hardware,
    per_host: int,
    simulated: bool = True,
    devices: Sequence[Hardware] = (),
) -> StepTime:
    """Estimates the seconds of a step.

    Args:
        stages: stages in the order of the chain; stage i is on rank i modulo pp, a tail on rank 0.
        layout: layout of the run.
        grid: groups of ranks of the layout.
        hardware: figures of the devices.
        per_host: devices of a host.
        simulated: run the schedule; otherwise return a lower bound, for a search.
        devices: device of each pipeline rank; empty: `hardware`.
    """
    devices = devices or (hardware,) * layout.pp

    def kind(stage: Stage) -> tuple[object, ...]:
        return stage.kinds, stage.calls, id(devices[stage.rank])

    different = {kind(stage): stage for stage in stages}
    known = {
        key: stage_time(one, layout, grid, devices[one.rank]) for key, one in different.items()
    }
    times = [known[kind(stage)] for stage in stages]
    by_rank, elements = [0.0] * layout.pp, [0.0] * layout.pp
    for stage, time in zip(stages, times, strict=True):
        by_rank[stage.rank] += time.total
        elements[stage.rank] += stage.elements(layout.shares)
    most = max(by_rank)
    if layout.pp == 1:
        pipeline = layout.microbatches * most
    elif simulated:
        pipeline = simulated_s(stages, times, layout, grid.next_stage.link)
    else:
        pipeline = layout.microbatches * most + (sum(by_rank) - most) / layout.chunks
    pairs = zip(elements, devices, strict=True)
    updated = max(own * _element_update_s(layout, device) for own, device in pairs) / layout.shard
    reduced = 0.0
    for key, stage in different.items():
        seconds = sum(cost.seconds for cost in step_costs(stage, layout, grid))
        # Devices send while they compute; cores do not.
        hidden = 0.0 if hardware.at_once else known[key].backward + known[key].weight
        reduced = max(reduced, seconds - hidden)
    shared = 0.0
    if hardware.at_once:
        cores = Cores.of(hardware, layout, per_host)
        together = layout.num_ranks // layout.pp  # ranks that do the same at the same time
        if layout.pp == 1:
            shared = (cores.pace(together) - 1) * pipeline
        elif simulated:
            shared = cores.stretch(stages, times, layout, grid.next_stage.link) * pipeline
        else:
            shared = max(0.0, together * layout.microbatches * sum(by_rank) / cores.num - pipeline)
        shared += (cores.crowding(layout) - 1) * (pipeline + shared)
        shared += (cores.pace(layout.num_ranks) - 1) * (reduced + updated)
    total = pipeline + reduced + updated + shared
    return StepTime(
        total=total,
        pipeline=pipeline,
        bubble=max(0.0, 1 - layout.microbatches * most / total),
        reduced=reduced,
        updated=updated,
        stages=tuple(times),
        shared=shared,
        busiest=by_rank.index(most),
    )


def _element_update_s(layout: Layout, device: Hardware) -> float:
    """Returns the seconds in which a device updates one element."""
    moved = _UPDATE_BYTES + 2 * moment_bytes(layout.state_dtype)
    seconds = moved / device.memory_bytes_per_s
    if device.overheads is not None:
        seconds = device.overheads.update_element_s
    if not layout.offloads_state:
        return seconds
    # Both directions at a time; copies take longer than the update.
    copied = moment_bytes(layout.state_dtype) / device.host_copy_bytes_per_s
    return seconds + copied if device.at_once else max(seconds, copied)


def sent_bytes(stages: Sequence[Stage], layout: Layout, grid: Grid) -> dict[str, float]:
    """Returns the bytes of the rank that sends most in a step, by purpose."""
    ranks: list[dict[str, float]] = [defaultdict(float) for _ in range(layout.pp)]
    for position, stage in enumerate(stages):
        sent = ranks[stage.rank]
        for part, count in stage.kinds:
            ahead, back = exchanges(part, layout, grid)
            repeats = 1 + layout.repeats(part)
            for kind in ahead:
                one = ahead[kind] * repeats + back[kind]
                sent[kind] += layout.microbatches * count * one.num_bytes
        gather, scatter = sharded_costs(stage, layout, grid)
        reduced, gathered = step_costs(stage, layout, grid)
        sent["gather"] += 2 * layout.microbatches * gather.num_bytes + gathered.num_bytes
        sent["reduce"] += layout.microbatches * scatter.num_bytes + reduced.num_bytes
        if position > 0 and stage.rank != stages[position - 1].rank:
            num_bytes = layout.microbatches * layout.microbatch * stage.input_bytes
            for rank in (stage.rank, stages[position - 1].rank):
                ranks[rank]["pipeline"] += num_bytes
    return max(ranks, key=lambda sent: sum(sent.values()))
