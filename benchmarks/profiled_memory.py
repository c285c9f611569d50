"""Measures the peak of a function's tensors on the CPU, with PyTorch's profiler.

The profiler sees what one thread allocates, temporary memory inside of operators included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns the most bytes that tensors took beside those that were there before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    steps = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    live = peak = 0
    for _, num_bytes in sorted(steps, key=lambda step: step[0]):
        live += num_bytes
        peak = max(peak, live)
    return peak
