"""Searches for the fastest layouts that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import smp._C as _C
from smp.planning.hardware import Hardware
from smp.planning.layout import Layout, other_ranks
from smp.planning.memory import RankBytes
from smp.planning.profile import ModelProfile, Part
from smp.planning.run_cuts import RunCuts
from smp.planning.sent import sent_bytes
from smp.planning.stages import (
    Content,
    Stage,
    Terms,
    contents_of,
    cut,
    held_by_rank,
    peak_bytes,
)
from smp.planning.step_time import Grid, StepTime, step_time

_MICROBATCHES = (1, 2, 4, 8, 16)
_SIMULATED = 24  # number of candidates that are simulated
_USABLE = 0.9  # share of a device's memory, as in the library's own partition
_SKEW = 1.5  # largest bound of a simulated candidate, over the best one's bound


@dataclass(frozen=True)
class Job:
    """A model, devices and samples for which a layout is searched.

    Attributes:
        profile: profile of the model, traced for this hardware and precision.
        hardware: figures of the devices.
        num_ranks: number of devices.
        per_host: devices of a host.
        memory_bytes: memory of a device.
        samples: samples of a step, over all devices.
        precision: "fp32", "bf16" or "fp16".
        split_profile: profile of the model with the library's tensor-parallel operators; None:
            the model's own code is split.
        cuts, split_cuts: partitions that runs of the two profiles would have; None: stages are cut
            between parts of the profile.
    """

    profile: ModelProfile
    hardware: Hardware
    num_ranks: int
    per_host: int
    memory_bytes: int
    samples: int
    precision: str
    split_profile: ModelProfile | None = None
    cuts: RunCuts | None = None
    split_cuts: RunCuts | None = None

    @property
    def half(self) -> bool:
        """Returns whether parameters have 16 bits."""
        return self.precision != "fp32"

    def profile_of(self, tp: int) -> ModelProfile:
        """Returns the profile that counts with `tp` tensor-parallel ranks."""
        if tp == 1 or self.split_profile is None:
            return self.profile
        return self.split_profile

    def cuts_of(self, tp: int) -> RunCuts | None:
        """Returns the partitions that count with `tp` tensor-parallel ranks."""
        return self.cuts if tp == 1 or self.split_profile is None else self.split_cuts

    @property
    def usable_bytes(self) -> float:
        """Returns the bytes of a device that a plan may take."""
        return _USABLE * self.memory_bytes


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted time and memory.

    Attributes:
        layout: the layout.
        stages: stages that the model is cut into.
        time: time of a step.
        held: bytes of each pipeline rank at its peak.
        grid: groups of ranks of the layout.
    """

    layout: Layout
    stages: tuple[Stage, ...]
    time: StepTime
    held: tuple[RankBytes, ...]
    grid: Grid

    @property
    def peak_bytes(self) -> float:
        """Returns the peak bytes of the fullest rank."""
        return max(rank.peak for rank in self.held)

    def shares(self) -> dict[str, float]:
        """Returns shares of the step by what the busiest rank does; their sum is 1."""
        time, rounds = self.time, self.layout.microbatches
        own = [
            t
            for s, t in zip(self.stages, time.stages, strict=True)
            if s.rank == self.stages[time.busiest].rank
        ]
        exchanged = rounds * sum(t.exchanged for t in own)
        gathered = rounds * sum(t.gathered for t in own)
        copied = rounds * sum(t.copied for t in own)
        again = rounds * sum(t.again for t in own)
        busy = rounds * sum(t.total for t in own)
        parts = {
            "compute": busy - exchanged - gathered - copied - again,
            "second forward": again,
            "tensor exchange": exchanged,
            "gathers": gathered,
            "offloading": copied,
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

    def sent(self, precision: str) -> dict[str, float]:
        """Returns the bytes of the rank that sends most in a step, by link: "inside", "between"."""
        grid = self.grid
        crosses = {
            "tensor": grid.tensor.crosses,
            "experts": grid.tensor.crosses,
            "gather": grid.shard.crosses,
            "reduce": grid.replicas.crosses or grid.shard.crosses,
            "pipeline": grid.next_stage.crosses,
        }
        result = {"inside": 0.0, "between": 0.0}
        for kind, num_bytes in sent_bytes(self.stages, self.layout, grid, precision).items():
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
    cuts = job.cuts_of(layout.tp)
    if cuts is None or layout.pp == 1:
        stages = _cuts(job.profile_of(layout.tp), layout)
    else:
        stages = tuple(cuts.stages(layout, job.precision, int(job.usable_bytes)))
    return _predicted(job, layout, stages, simulated)


def _cuts(profile: ModelProfile, layout: Layout) -> tuple[Stage, ...]:
    again = 1.0 if layout.checkpoints else 0.0
    shares = layout.shares

    def weight(part: Part) -> float:
        runs = 1 + (again if part.is_layer else 0)
        split = runs * part.split_forward + part.split_backward
        whole = runs * part.whole_forward + part.whole_backward
        return split * shares.split + whole * shares.whole

    return tuple(cut(profile, layout.pp, layout.chunks, weight))


def _predicted(job: Job, layout: Layout, stages: tuple[Stage, ...], simulated: bool) -> Plan:
    time, grid = _time(job, layout, stages, simulated)
    contents = contents_of(stages, layout.pp, layout.chunks)
    held = held_by_rank(contents, Terms.of(layout, job.half, job.hardware.bucket_bytes))
    return Plan(layout, stages, time, tuple(held), grid)


def _time(
    job: Job, layout: Layout, stages: Sequence[Stage], simulated: bool
) -> tuple[StepTime, Grid]:
    apart = 0.0
    if layout.spreads_experts:
        apart = other_ranks(layout.tp, job.profile.experts, job.profile.routed)
    grid = Grid.of(layout, job.per_host, job.hardware, apart)
    time = step_time(
        stages, layout, grid, job.hardware, job.precision, job.per_host, simulated=simulated
    )
    return time, grid


def search(job: Job, tell: Callable[[str], None] = lambda text: None) -> Found:
    """Returns the fastest layouts that fit.

    Args:
        job: the model, devices and samples.
        tell: function that is called with lines about the progress of the search.
    """
    fitting: list[tuple[float, Layout]] = []  # with bounds of their times
    closest: Layout | None = None
    least = math.inf
    tried = 0
    cuts: dict[tuple[object, ...], tuple[tuple[Stage, ...], list[Content]]] = {}
    peaks: dict[Layout, float] = {}
    for layout in layouts(job):
        key = (layout.pp, layout.chunks, layout.tp, layout.checkpoints, layout.in_memory)
        if key not in cuts:
            stages = _cuts(job.profile_of(layout.tp), layout)
            cuts[key] = stages, contents_of(stages, layout.pp, layout.chunks)
            tell(f"pp {layout.pp}, tp {layout.tp}: {tried} layouts looked at, {len(fitting)} fit")
        tried += 1
        stages, contents = cuts[key]
        # Layouts that differ in their placement alone follow each other.
        anywhere = replace(layout, placement="DPT")
        if anywhere not in peaks:
            terms = Terms.of(layout, job.half, job.hardware.bucket_bytes)
            peaks = {anywhere: peak_bytes(contents, terms)}
        peak = peaks[anywhere]
        if peak <= job.usable_bytes:
            fitting.append((_time(job, layout, stages, simulated=False)[0].total, layout))
        elif peak < least:
            least, closest = peak, layout
    nearest = None if fitting or closest is None else predict(job, closest, simulated=False)
    return Found(tuple(_best(job, fitting, tell)), tried, len(fitting), nearest)


def _best(
    job: Job, fitting: Sequence[tuple[float, Layout]], tell: Callable[[str], None]
) -> list[Plan]:
    """Simulates the fastest of each kind and sorts them; kinds differ in more than microbatches."""
    kinds: dict[Layout, tuple[float, Layout]] = {}
    for bound_s, layout in sorted(fitting, key=lambda found: found[0]):
        kind = replace(layout, microbatch=1, microbatches=1, placement="DPT")
        kinds.setdefault(kind, (bound_s, layout))
    simulated: list[Plan] = []
    most = math.inf
    for bound_s, layout in kinds.values():  # in the order of their bounds
        if len(simulated) == _SIMULATED or bound_s > most:
            break
        tell(f"simulating the best of {len(fitting)}: {len(simulated)} of {_SIMULATED}")
        plan = _as_run(job, layout)
        if plan is not None and plan.peak_bytes <= job.usable_bytes:
            simulated.append(plan)
            most = min(most, _SKEW * bound_s)
    return sorted(simulated, key=lambda plan: (plan.time.total, plan.peak_bytes))


def _as_run(job: Job, layout: Layout) -> Plan | None:
    """Predicts a layout with the partition of a run; returns None if there is no such partition."""
    try:
        return predict(job, layout)
    except ValueError:
        return None


def layouts(job: Job) -> Iterator[Layout]:
    """Yields all layouts that are worth a look, in a fixed order."""
    for tp in _tensor_degrees(job):
        num_parts = len(job.profile_of(tp).parts)
        for pp in _divisors(job.num_ranks // tp):
            rdp = job.num_ranks // (tp * pp)
            if pp > num_parts or job.samples % rdp:
                continue
            per_replica = job.samples // rdp
            for microbatch in _MICROBATCHES:
                if per_replica % microbatch:
                    continue
                base = Layout(
                    pp=pp, tp=tp, rdp=rdp, microbatch=microbatch,
                    microbatches=per_replica // microbatch,
                )  # fmt: skip
                yield from _choices(base, job, num_parts)


def _choices(base: Layout, job: Job, num_parts: int) -> Iterator[Layout]:
    shardings = [(1, False), (base.rdp, False)]
    inside = max(1, job.per_host // base.tp)
    shardings += [(q, True) for q in sorted({inside, base.rdp}) if base.rdp % q == 0]
    has_layers = any(part.is_layer for part in job.profile.parts)
    keeping = [(False, False)] + ([(True, False), (True, True)] if has_layers else [])
    borders = _borders(base, job)
    placements = ("DPT", "PDT") if base.pp > 1 and base.rdp > 1 else ("DPT",)
    for schedule, policy in _policies(base.pp).items():
        chunks = policy.default_chunks if base.pp > 1 else 1
        if base.pp * chunks > num_parts or (chunks > 1 and base.microbatches % base.pp):
            continue
        active = policy.default_active_microbatches(base.pp, base.microbatches)
        actives = {min(active, base.microbatches)}
        if chunks == 1:
            actives.add(min(base.pp, base.microbatches))
        for count in sorted(actives):
            for shard, shards_parameters in dict.fromkeys(shardings):
                if shards_parameters and shard == 1:
                    continue
                for checkpoints, offload in keeping:
                    for in_memory, spreads in borders:
                        for placement in placements:
                            yield replace(
                                base,
                                schedule=schedule,
                                chunks=chunks,
                                active=count,
                                shard=shard,
                                shards_parameters=shards_parameters,
                                checkpoints=checkpoints,
                                offload=offload,
                                in_memory=in_memory,
                                spreads_experts=spreads,
                                placement=placement,
                            )


def _borders(base: Layout, job: Job) -> list[tuple[bool, bool]]:
    """Returns pairs: whether activations are cut between layers, whether experts are spread."""
    if base.tp == 1:
        return [(False, False)]
    if job.profile.experts == 0:
        return [(True, False), (False, False)]
    # Mixtures are split by their plans, which have no such choice of activations.
    spread = [(False, True)] if job.profile.experts % base.tp == 0 else []
    return [(False, False), *spread]


def _policies(pp: int) -> dict[str, _C.Policy]:
    """Returns policies by name, without those that keep all microbatches."""
    if pp == 1:
        return {_C.DEFAULT_POLICY: _C.make_policy(_C.DEFAULT_POLICY)}
    policies = {name: _C.make_policy(name) for name in _C.policy_names()}
    return {name: p for name, p in policies.items() if not p.forwards_come_first}


def _tensor_degrees(job: Job) -> list[int]:
    """Returns the divisors of a host's devices that leave whole heads to each rank."""
    if job.profile.heads == 0:
        return [1]
    degrees = _divisors(min(job.per_host, job.num_ranks))
    return [t for t in degrees if job.num_ranks % t == 0 and job.profile.heads % t == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
