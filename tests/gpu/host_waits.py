"""Calls of the CUDA runtime for which the host waits, as PyTorch's profiler records them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

WAITS = {
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaStreamSynchronize",
}
REGION = "what is looked at"


def waits_of(work: Callable[[], object]) -> list[str]:
    """Names of the calls, in order, that waited while ``work`` ran, on any thread.

    The work itself is not waited for. Without a CUDA device there are none.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(REGION):
            work()
    return waits_in(list(profile.events()))


def waits_in(events: Iterable[Any]) -> list[str]:
    """Returns the names of recorded events that waited within the region."""
    events = list(events)
    # The device has a range of the same name, over what was asked of it there.
    [region] = [e for e in events if e.name == REGION and e.device_type.name == "CPU"]
    begin, end = region.time_range.start, region.time_range.end
    waits = [e for e in events if e.name in WAITS and begin <= e.time_range.start < end]
    return [e.name for e in sorted(waits, key=lambda e: e.time_range.start)]
