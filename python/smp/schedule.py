"""Schedules of a pipeline as texts: planned, simulated, executed."""

from smp.pipeline.schedules import (
    POLICIES,
    Boundary,
    RankUsage,
    Simulation,
    Stage,
    TimelineEntry,
    normalize,
    plan,
    simulate,
)

__all__ = [
    "POLICIES",
    "Boundary",
    "RankUsage",
    "Simulation",
    "Stage",
    "TimelineEntry",
    "normalize",
    "plan",
    "simulate",
]
