"""Estimates how long microbatches take through a pipeline, on own devices or on shared cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import smp._C as _C
from smp.partition.fastest import simulated_step_ms
from smp.planning.hardware import Hardware, Link
from smp.planning.layout import Layout
from smp.planning.stages import Stage

_SHOWN_PER_RANK = 4  # microbatches per rank of a simulation whose timeline is read


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage.

    Attributes:
        forward, backward, weight: seconds of the three kinds of work, with exchanges that are
            waited for and a second forward.
        exchanged: part of these seconds for exchanges of split layers.
        gathered: part of these seconds for parameters that did not arrive in time.
        copied: part of these seconds for activations that are copied to the host and back.
        again: part of these seconds for the second forward.
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
        """Returns the seconds of all three kinds of work."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Cores:
    """The cores of the hosts that ranks of a layout share.

    Attributes:
        num: number of cores of all hosts.
        alone: speed of a core while the others of its host idle, over its speed while all work.
        crowded: factor by which work takes longer per kind of waiting; see `Overheads`.
    """

    num: int
    alone: float = 1.0
    crowded: float = 1.0

    @classmethod
    def of(cls, hardware: Hardware, layout: Layout, per_host: int) -> Cores:
        """Returns the cores of the hosts that a layout takes."""
        hosts = -(-layout.num_ranks // per_host)
        num = hosts * min(hardware.at_once, per_host)
        overheads = hardware.overheads
        return cls(num) if overheads is None else cls(num, overheads.alone, overheads.crowded)

    def crowding(self, layout: Layout) -> float:
        """Returns the factor by which microbatches take longer if ranks outnumber cores."""
        if layout.num_ranks <= self.num:
            return 1.0
        return self.crowded ** ((layout.pp > 1) + (layout.tp > 1) + layout.cuts_parameters)

    def pace(self, working: int) -> float:
        """Returns the factor by which work takes longer (or less) while `working` ranks work."""
        if working >= self.num:
            return working / self.num
        if self.num == 1 or working == 0:
            return 1.0
        idle = (self.num - working) / (self.num - 1)
        return 1 / (1 + idle * (self.alone - 1))

    def stretch(
        self, stages: Sequence[Stage], times: Sequence[StageTime], layout: Layout, link: Link
    ) -> float:
        """Returns the extra time of all microbatches, as a share of that on a device per rank."""
        together = layout.num_ranks // layout.pp  # ranks that do the same at the same time
        # So many microbatches show how many ranks work at one time.
        rounds = min(layout.microbatches, _SHOWN_PER_RANK * layout.pp)
        active = min(layout.active, rounds)
        costs = _costs(stages, times, layout, link)
        timeline = _C.simulate_policy(*costs, rounds, active, layout.schedule).timeline
        changes = sorted(
            [(entry.start_ms, 1) for entry in timeline] + [(entry.end_ms, -1) for entry in timeline]
        )
        begin = now = taken = 0.0
        working = 0
        for now, change in changes:
            taken += (now - begin) * self.pace(working * together)
            working += change
            begin = now
        return taken / now - 1 if now else 0.0


def simulated_s(
    stages: Sequence[Stage], times: Sequence[StageTime], layout: Layout, link: Link
) -> float:
    """Returns the seconds of all microbatches in the pipeline if each rank has its own device."""
    costs = _costs(stages, times, layout, link)
    return simulated_step_ms(*costs, layout.pp, layout.shape) / 1e3


def _costs(
    stages: Sequence[Stage], times: Sequence[StageTime], layout: Layout, link: Link
) -> tuple[list[_C.StageCost], list[_C.BoundaryCost]]:
    costs = [
        _C.StageCost(stage.rank, 1e3 * t.forward, 1e3 * t.backward, 1e3 * t.weight, 0)
        for stage, t in zip(stages, times, strict=True)
    ]
    sizes = [int(layout.microbatch * stage.input_bytes) for stage in stages[1:]]
    latency_ms, byte_ms = 1e3 * link.latency_s, 1e3 / link.bytes_per_s
    return costs, [_C.BoundaryCost(latency_ms, byte_ms, size, size) for size in sizes]
