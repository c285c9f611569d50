"""Searches for the fastest layouts that fit into memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import smp._C as _C
from smp.planning.groups import Grid
from smp.planning.hardware import Hardware
from smp.planning.kept_layers import marked, most_kept
from smp.planning.kinds import Kinds
from smp.planning.layout import Layout
from smp.planning.memory import RankBytes, held_by_rank, peak_bytes
from smp.planning.profile import ModelProfile, Part
from smp.planning.run_cuts import View
from smp.planning.stages import Content, Stage, contents_of, cut
from smp.planning.step_time import StepTime, sent_bytes, step_time

MICROBATCHES = (1, 2, 4, 8, 16)
_SIMULATED = 24  # number of candidates that fit and are simulated
_PARTITIONED = 96  # number of candidates that get the partition of a run
USABLE = 0.9  # share of a device's memory, as in the library's own partition
_SKEW = 1.5  # largest bound of a simulated candidate, over the best one's bound


@dataclass(frozen=True)
class Job:
    """A model, devices and samples for which a layout is searched.

    Attributes:
        whole: the model, traced for this hardware and precision.
        hardware: figures of the devices; of the slowest one if there are several kinds.
        num_ranks: number of devices.
        per_host: devices of a host.
        memory_bytes: memory of a device, or of the smallest one.
        samples: samples of a step, over all devices.
        precision: "fp32", "bf16" or "fp16".
        split: the model with the library's tensor-parallel operators; None: its own code is split.
        keys: keys of the configuration that are the same in all layouts.
        state_dtype: storage of the optimizer's moments.
        masters: storage of digits that 16-bit parameters lack.
        offloads_state: moments of the optimizer are in host memory.
        drops_gradients: gradients are applied in the backward: one microbatch, nothing sharded.
        kinds: the devices, if there are several kinds.
        fixed: values of `layout.KEYS` that all layouts have.
        shares_sequences: layouts may have `context_parallel_degree`. Only a run knows whether
            blocks of the model can compute parts of sequences.
    """

    whole: View
    hardware: Hardware
    num_ranks: int
    per_host: int
    memory_bytes: int
    samples: int
    precision: str
    split: View | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    state_dtype: str = "fp32"
    masters: str = "fp32"
    offloads_state: bool = False
    drops_gradients: bool = False
    kinds: Kinds | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    shares_sequences: bool = True

    @property
    def profile(self) -> ModelProfile:
        """Returns the chain of the model."""
        return self.whole.profile

    def view(self, tp: int) -> View:
        """Returns the model that counts with `tp` tensor-parallel ranks."""
        return self.whole if tp == 1 or self.split is None else self.split

    def layers(self, layout: Layout) -> list[str]:
        """Returns the names of the repeated layers."""
        return [part.name for part in self.view(layout.tp).profile.chain if part.is_layer]

    @property
    def usable_bytes(self) -> float:
        """Returns the bytes of a device that a plan may take."""
        return USABLE * self.memory_bytes

    def rooms(self, layout: Layout) -> tuple[float, ...]:
        """Returns the bytes that a plan may take on each pipeline rank."""
        if self.kinds is None:
            return (self.usable_bytes,) * layout.pp
        return tuple(USABLE * num_bytes for num_bytes in self.kinds.least_bytes(layout))

    def devices(self, layout: Layout) -> list[Hardware]:
        """Returns the device of each pipeline rank; empty where all are `hardware`."""
        return [] if self.kinds is None else self.kinds.awaited(layout, self.hardware)

    def of_kinds(self, layout: Layout) -> Layout:
        """Returns a layout with the keys that tell a run what kinds of devices it has."""
        if self.kinds is None:
            return layout
        limits = self.rooms(layout) if self.kinds.has_uneven_memory and layout.pp > 1 else ()
        return replace(
            layout,
            device_speeds=self.kinds.device_speeds,
            memory_limits=tuple(map(int, limits)),
        )

    def gives_samples_to_all(self, layout: Layout) -> bool:
        """Returns whether each replica has a sample for each microbatch."""
        if self.kinds is None:
            return True
        samples = self.kinds.samples(layout, self.samples)
        return min(samples) >= layout.microbatches


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted time and memory.

    Attributes:
        layout: the layout.
        stages: stages that the model is cut into.
        time: time of a step.
        held: bytes of each pipeline rank at its peak, in the replica with the least room for them.
        rooms: bytes that it may take there.
        grid: groups of ranks of the layout.
    """

    layout: Layout
    stages: tuple[Stage, ...]
    time: StepTime
    held: tuple[RankBytes, ...]
    rooms: tuple[float, ...]
    grid: Grid

    @property
    def peak_bytes(self) -> float:
        """Returns the peak bytes of the fullest rank."""
        return max(rank.peak for rank in self.held)

    @property
    def filled(self) -> float:
        """Returns the peak over the room of the rank that is filled most."""
        return max(held.peak / room for held, room in zip(self.held, self.rooms, strict=True))

    def rank_seconds(self) -> list[float]:
        """Returns the seconds of one microbatch on each pipeline rank."""
        found = [0.0] * self.layout.pp
        for stage, time in zip(self.stages, self.time.stages, strict=True):
            found[stage.rank] += time.total
        return found

    def shares(self) -> dict[str, float]:
        """Returns shares of the step by what the busiest rank does; their sum is 1."""
        time = self.time
        own = [
            stage_time
            for stage, stage_time in zip(self.stages, time.stages, strict=True)
            if stage.rank == time.busiest
        ]

        def spent(key: str) -> float:
            total: float = sum(getattr(one, key) for one in own)
            return self.layout.microbatches * total

        others = {
            "second forward": spent("again"),
            "exchange in layers": spent("exchanged"),
            "gathers": spent("gathered"),
            "offloading": spent("copied"),
        }
        parts = {
            "compute": spent("total") - sum(others.values()),
            **others,
            "gradient sums": time.reduced,
            "optimizer": time.updated,
            "cores": time.shared,
        }
        parts["bubble"] = max(0.0, time.total - sum(parts.values()))
        return {name: seconds / time.total for name, seconds in parts.items() if seconds > 0}

    @property
    def bound(self) -> str:
        """Returns the name of the largest share but "compute", or "compute" if all are below 5%."""
        others = {name: share for name, share in self.shares().items() if name != "compute"}
        most = max(others, key=others.__getitem__, default="compute")
        return most if others and others[most] >= 0.05 else "compute"

    def sent(self) -> dict[str, float]:
        """Returns the bytes of the rank that sends most in a step, by link: "inside", "between"."""
        grid = self.grid
        crosses = {
            "tensor": grid.tensor.crosses,
            "experts": grid.tensor.crosses,
            "gather": grid.shard.crosses,
            "reduce": grid.replicas.crosses or grid.shard.crosses,
            "pipeline": grid.next_stage.crosses,
            "context": grid.context.crosses,
        }
        result = {"inside": 0.0, "between": 0.0}
        for kind, num_bytes in sent_bytes(self.stages, self.layout, grid).items():
            result["between" if crosses[kind] else "inside"] += num_bytes
        return result


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        plans: the fastest first; of equal degrees and choices the best microbatches and placement.
        tried: number of layouts that were looked at.
        fitting: number of these that fit.
        nearest: the plan that needs least memory if nothing fits, or None.
    """

    plans: tuple[Plan, ...]
    tried: int
    fitting: int
    nearest: Plan | None


def predict(job: Job, layout: Layout, simulated: bool = True) -> Plan:
    """Returns the predicted time and memory of one layout.

    Raises:
        ValueError: the model cannot be cut into the stages of the layout.
    """
    layout = job.of_kinds(layout)
    return _planned(job, layout, _stages(job, layout), simulated)


def _stages(job: Job, layout: Layout) -> list[Stage]:
    view = job.view(layout.tp)
    if view.cuts is not None and layout.pp > 1:
        return view.cuts.stages(layout, tuple(map(int, job.rooms(layout))))
    return marked(_cuts(job, layout), layout.kept_layers, layout.pp)


def _keeping_more(job: Job, plan: Plan) -> Plan:
    """Returns a plan that computes fewer layers again, as far as each rank has room."""

    def filled(stages: Sequence[Stage]) -> list[float]:
        contents = contents_of(stages, plan.layout.pp, plan.layout.chunks)
        held, rooms = _held(job, plan.layout, contents)
        return [own.peak / room for own, room in zip(held, rooms, strict=True)]

    layers = job.layers(plan.layout)
    kept = most_kept(plan.stages, layers, plan.layout, filled)
    if len(kept) in (0, len(layers)):
        return plan  # a layout without checkpoints is another candidate
    layout = replace(plan.layout, kept_layers=kept)
    # A run cuts layers that keep their activations, so its partition may be another one.
    found = _planned(job, layout, _stages(job, layout), simulated=True)
    return found if found.filled <= 1 and found.time.total < plan.time.total else plan


def _planned(job: Job, layout: Layout, stages: Sequence[Stage], simulated: bool) -> Plan:
    time, grid = _time(job, layout, stages, simulated)
    held, rooms = _held(job, layout, contents_of(stages, layout.pp, layout.chunks))
    return Plan(layout, tuple(stages), time, held, rooms, grid)


def _cuts(job: Job, layout: Layout) -> list[Stage]:
    def weight(part: Part) -> float:
        runs = 1 + layout.repeats(part)
        return runs * part.forward.on(layout.shares) + part.backward.on(layout.shares)

    speeds = [device.rate(layout.precision) for device in job.devices(layout)]
    return cut(job.view(layout.tp).profile, layout.pp, layout.chunks, weight, speeds)


def _held(
    job: Job, layout: Layout, contents: Sequence[Content]
) -> tuple[tuple[RankBytes, ...], tuple[float, ...]]:
    """Returns bytes and room of each pipeline rank, in the replica that is filled most."""
    if job.kinds is None:
        return tuple(held_by_rank(contents, layout)), job.rooms(layout)
    places = job.kinds.places(layout)
    shares = {place.share for own in places for place in own}
    held = {share: held_by_rank(contents, replace(layout, share=share)) for share in shares}
    found = []
    for rank, own in enumerate(places):
        pairs = [
            (held[place.share][rank], USABLE * job.kinds.devices[place.kind].memory_bytes)
            for place in own
        ]
        found.append(max(pairs, key=lambda pair: pair[0].peak / pair[1]))
    return tuple(own for own, _ in found), tuple(room for _, room in found)


def _time(
    job: Job, layout: Layout, stages: Sequence[Stage], simulated: bool
) -> tuple[StepTime, Grid]:
    model, device = job.profile, job.hardware
    keys = model.sent_keys(layout.tp * layout.cp)
    grid = Grid.of(layout, job.per_host, device, model.experts, model.routed, keys)
    devices = job.devices(layout)
    return step_time(stages, layout, grid, device, job.per_host, simulated, devices), grid


def search(job: Job) -> Found:
    """Returns the fastest layouts that fit."""
    fitting: list[tuple[float, Layout]] = []  # with bounds of their times
    closest: Layout | None = None
    least = math.inf
    tried = 0
    cuts: dict[tuple[object, ...], tuple[list[Stage], list[Content]]] = {}
    filled: dict[Layout, float] = {}
    for layout in layouts(job):
        if job.fixed and not layout.has(job.fixed):
            continue
        # Kinds of devices are where a placement puts them; else it changes neither cut nor peak.
        anywhere = replace(layout, placement="DPT") if job.kinds is None else layout
        choices = (layout.chunks, layout.checkpoints, layout.in_memory)
        key = (layout.pp, layout.tp, anywhere.placement, *choices)
        if key not in cuts:
            stages = _cuts(job, layout)
            cuts[key] = stages, contents_of(stages, layout.pp, layout.chunks)
        tried += 1
        stages, contents = cuts[key]
        # Layouts that differ in their placement alone follow each other.
        if anywhere not in filled:
            filled = {anywhere: _filled(job, layout, contents)}
        if filled[anywhere] <= 1:
            fitting.append((_time(job, layout, stages, simulated=False)[0].total, layout))
        if filled[anywhere] < least:
            least, closest = filled[anywhere], layout
    plans = _best(job, fitting)
    nearest = None if plans or closest is None else _nearest(job, closest)
    return Found(tuple(plans), tried, len(fitting), nearest)


def _filled(job: Job, layout: Layout, contents: Sequence[Content]) -> float:
    """Returns the peak over the room of the rank that is filled most."""
    if job.kinds is None:
        return peak_bytes(contents, layout) / job.usable_bytes
    held, rooms = _held(job, layout, contents)
    peaks = [own.peak for own in held]
    if layout.pp > 1:  # the partition of a run gives less to ranks with less room
        return sum(peaks) / sum(rooms)
    return peaks[0] / rooms[0]


def _nearest(job: Job, layout: Layout) -> Plan:
    try:
        return predict(job, layout, simulated=False)
    except ValueError:  # a run has no such partition
        return _planned(job, layout, _cuts(job, layout), simulated=False)


def _best(job: Job, fitting: Sequence[tuple[float, Layout]]) -> list[Plan]:
    """Simulates the fastest of each kind and sorts them; kinds differ in more than microbatches."""
    kinds: dict[Layout, tuple[float, Layout]] = {}
    for bound_s, layout in sorted(fitting, key=lambda found: found[0]):
        kind = replace(layout, microbatch=1, microbatches=1, placement="DPT")
        kinds.setdefault(kind, (bound_s, layout))
    simulated: list[Plan] = []
    most = math.inf
    for bound_s, layout in list(kinds.values())[:_PARTITIONED]:  # in the order of their bounds
        if len(simulated) == _SIMULATED or bound_s > most:
            break
        try:
            plan = predict(job, layout)
        except ValueError:  # a run has no such partition
            continue
        if plan.filled <= 1:
            simulated.append(_keeping_more(job, plan) if layout.checkpoints else plan)
            most = min(most, _SKEW * bound_s)
    return sorted(simulated, key=lambda plan: (plan.time.total, plan.peak_bytes))


def layouts(job: Job) -> Iterator[Layout]:
    """Yields all layouts that are worth a look, in a fixed order."""
    for tp in _tensor_degrees(job):
        degrees = (
            (pp, cp)
            for pp in _divisors(job.num_ranks // tp)
            for cp in _context_degrees(job, tp * pp, tp)
        )
        for pp, cp in degrees:
            rdp = job.num_ranks // (tp * pp * cp)
            for microbatch in MICROBATCHES:
                microbatches, rest = divmod(job.samples, rdp * microbatch)
                if rest == 0 and (microbatches == 1 or not job.drops_gradients):
                    base = Layout(
                        pp=pp,
                        tp=tp,
                        rdp=rdp,
                        cp=cp,
                        microbatch=microbatch,
                        microbatches=microbatches,
                        precision=job.precision,
                        state_dtype=job.state_dtype,
                        masters=job.masters,
                        offloads_state=job.offloads_state,
                        drops_gradients=job.drops_gradients,
                        device=job.hardware.type,
                    )
                    yield from _choices(base, job)


def _choices(base: Layout, job: Job) -> Iterator[Layout]:
    """Yields the layouts that have the degrees and microbatches of one."""
    choices = itertools.product(
        _schedules(base, len(job.view(base.tp).profile.parts)),
        _shardings(base, job),
        _keeping(job),
        _borders(base, job),
        ("DPT", "PDT") if base.pp > 1 and base.replicas > 1 else ("DPT",),
    )
    for schedule, sharding, keeping, border, placement in choices:
        layout = replace(base, **schedule, **sharding, **keeping, **border, placement=placement)
        if job.gives_samples_to_all(layout):
            yield layout


def _schedules(base: Layout, num_parts: int) -> Iterator[dict[str, Any]]:
    """Yields schedules that do not keep all microbatches, with microbatches in flight."""
    names = [_C.DEFAULT_POLICY] if base.pp == 1 else _C.policy_names()
    for name in names:
        policy = _C.make_policy(name)
        chunks = policy.default_chunks if base.pp > 1 else 1
        if policy.forwards_come_first and base.pp > 1:
            continue
        if base.pp * chunks > num_parts or (chunks > 1 and base.microbatches % base.pp):
            continue
        actives = {policy.default_active_microbatches(base.pp, base.microbatches)}
        if chunks == 1:
            actives.add(base.pp)
        for active in sorted({min(active, base.microbatches) for active in actives}):
            yield {"schedule": name, "chunks": chunks, "active": active}


def _shardings(base: Layout, job: Job) -> list[dict[str, Any]]:
    if job.drops_gradients:
        return [{}]
    inside = max(1, job.per_host // base.tp)
    most = base.replicas
    whole = sorted({q for q in (inside, most) if q > 1 and most % q == 0})
    pairs = [(q, False) for q in sorted({1, most})] + [(q, True) for q in whole]
    return [{"shard": shard, "shards_parameters": parameters} for shard, parameters in pairs]


def _keeping(job: Job) -> list[dict[str, Any]]:
    pairs = [(False, False)]
    if any(part.is_layer for part in job.profile.parts):
        pairs += [(True, False), (True, True)]
    return [{"checkpoints": again, "offload": offload} for again, offload in pairs]


def _borders(base: Layout, job: Job) -> list[dict[str, Any]]:
    """Returns whether activations are cut between layers, and whether experts are spread."""
    experts = job.profile.experts
    if base.tp == 1:
        return [{}]
    if experts == 0:
        return [{"in_memory": True}, {}]
    # Mixtures are split by their plans, which have no such choice of activations.
    return [{}, {"spreads_experts": True}] if experts % base.tp == 0 else [{}]


def _tensor_degrees(job: Job) -> list[int]:
    """Returns the divisors of a host's devices that leave whole heads to each rank."""
    inside = min(job.per_host, job.num_ranks)
    return _divisors(math.gcd(inside, job.num_ranks, job.profile.heads or 1))


def _context_degrees(job: Job, others: int, tp: int) -> list[int]:
    """Returns degrees that leave whole heads and several tokens to each rank.

    Args:
        job: the job.
        others: number of ranks along pipeline and tensor parallelism.
        tp: tensor-parallel degree.
    """
    heads, tokens = job.profile.heads // tp, job.profile.tokens
    if not job.shares_sequences:
        return [1]
    if job.kinds is not None:  # parts of sequences are even, so all wait for the slowest device
        return [1]
    return [
        cp
        for cp in _divisors(job.num_ranks // others)
        if cp == 1 or (heads > 0 and heads % cp == 0 and tokens >= 2 * cp)
    ]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
