"""The one timer of the benchmarks: warm-up, interleaved repeats, median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Durations of the repeats of one contender, in seconds and in order.

    Attributes:
        samples_s: seconds on the clock.
        cpu_samples_s: seconds for which the threads of this process worked meanwhile.
    """

    samples_s: tuple[float, ...]
    cpu_samples_s: tuple[float, ...] = ()

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def cpu(self) -> Timing:
        """The same repeats with CPU seconds in place of the clock's."""
        return Timing(self.cpu_samples_s)

    def summary(self, prefix: str = "", scale: float = 1e3, unit: str = "ms") -> dict[str, float]:
        """Median, quartiles and minimum, keys ending in the unit."""
        return {
            f"{prefix}{name}_{unit}": value * scale
            for name, value in _spread(self.samples_s).items()
        }


def compare(timing: Timing, baseline: Timing) -> dict[str, float]:
    """Ratio to a baseline measured in turns with it: median and quartiles over pairs."""
    pairs = zip(timing.samples_s, baseline.samples_s, strict=True)
    spread = _spread([own / other for own, other in pairs])
    return {f"ratio_{name}": value for name, value in spread.items()}


def measure(
    contenders: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int,
    sync: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Times all contenders in turns, so that a disturbance of the machine hits all of them.

    Args:
        contenders: name to what is timed; called ``warmup + repeats`` times each.
        sync: called before and after each timed call, e.g. a barrier over ranks and devices;
            the second call is part of the time.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for repeat in range(warmup + repeats):
        for name, run in contenders.items():
            sync()
            cpu_s, started_s = time.process_time(), time.perf_counter()
            run()
            sync()
            if repeat >= warmup:
                taken_s = time.perf_counter() - started_s
                samples[name].append((taken_s, time.process_time() - cpu_s))
    results = {}
    for name, pairs in samples.items():
        taken, cpu = zip(*pairs, strict=True)
        results[name] = Timing(taken, cpu)
    return results


def _spread(values: tuple[float, ...] | list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "min": min(values)}
