"""Logs figures of training steps in regular intervals, and sends them to trackers.

Each rank measures itself, without communication. A step costs some additions. Counters are read,
and numbers of the script copied from their device, only when a stretch of steps ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from smp._device import device_module, is_accelerator
from smp.observe import metrics, trackers
from smp.observe.device_use import device_utilisation
from smp.world import runtime
from smp.world.log import first_rank_log
from smp.world.observers import StepObserver

_log = logging.getLogger("smp")
_FORMATS = {
    "step_ms": ".2f",
    "in_step": ".3f",
    "samples_per_s": ".1f",
    "bubble": ".4f",
    "sent_mb": ".3f",
    "rss_mb": ".1f",
    "device_mb": ".1f",
    "device_util": ".0f",
}


def format_figures(step: int, values: Mapping[str, float]) -> str:
    """Formats figures as ``"step=100 step_ms=12.50 ..."``."""
    parts = [f"{key}={value:{_FORMATS.get(key, '.6g')}}" for key, value in values.items()]
    return " ".join([f"step={step}", *parts])


class _Stretch:
    """Figures of a stretch of training steps for one consumer.

    Args:
        current: the runtime.
        every: number of training steps of a stretch.
        take: function that is called with the number of the last step and the figures.
        clock: function that returns increasing seconds.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        every: int,
        take: Callable[[int, dict[str, float]], object],
        clock: Callable[[], float],
    ) -> None:
        self._current, self._every, self._take, self._clock = current, every, take, clock
        self._begin()

    def _begin(self) -> None:
        self._began_s = self._clock()
        self._in_step_s = 0.0
        self._num_samples = self._num_steps = 0
        self._before = metrics.stats_of(self._current)

    def add(self, duration_s: float, trains: bool, num_samples: int) -> None:
        """Adds one call of a step function."""
        self._in_step_s += duration_s
        self._num_steps += trains
        self._num_samples += num_samples if trains else 0

    def end_if_full(self, step: int, extra: Mapping[str, Any]) -> bool:
        """Passes the figures to `take` if the stretch is over, and returns whether it is."""
        if self._num_steps < self._every:
            return False
        values = self._figures() | {name: _number(value) for name, value in extra.items()}
        self._begin()
        self._take(step, {name: value for name, value in values.items() if math.isfinite(value)})
        return True

    def _figures(self) -> dict[str, float]:
        rank, count = self._current.rank, self._num_steps
        passed_s = max(self._clock() - self._began_s, 1e-9)
        after = metrics.stats_of(self._current)
        values = {"step_ms": passed_s / count * 1e3, "in_step": self._in_step_s / passed_s}
        if self._num_samples:
            own_batches = "rdp" if rank.config.prescaled_batch else "dp"
            values["samples_per_s"] = self._num_samples * rank.sizes[own_batches] / passed_s
        if rank.sizes["pp"] > 1:
            idle_s = after["idle_s"] - self._before["idle_s"]
            values["bubble"] = idle_s / max(self._in_step_s, 1e-9)
        if rank.world_size > 1:
            values["sent_mb"] = (after["bytes_sent"] - self._before["bytes_sent"]) / count * 1e-6
        values["rss_mb"] = metrics.resident_bytes() * 1e-6
        if is_accelerator(rank.device):
            values["device_mb"] = (
                device_module(rank.device).max_memory_allocated(rank.device) * 1e-6
            )
            if (busy := device_utilisation(rank.device)) is not None:
                values["device_util"] = busy
        return values


class StepLog(StepObserver):
    """Collects figures of the training steps of a rank for the log and for trackers.

    The first step does not count: in it models are traced, partitioned and compared.

    Args:
        current: the runtime.
        clock: function that returns increasing seconds.
    """

    def __init__(
        self, current: runtime.Runtime, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._current, self._clock = current, clock
        self._step = 0
        self._stretches: list[_Stretch] = []
        self._trackers: list[trackers.Tracker] = []
        self._wanted: list[tuple[int, Callable[[int, dict[str, float]], object]]] = []
        self._extra: dict[str, Any] = {}
        every = current.rank.settings.metrics_every
        if every and current.rank.global_rank == 0:
            self._want(every, self._write_line)
        current.on_shutdown(self.close)

    def _want(self, every: int, take: Callable[[int, dict[str, float]], object]) -> None:
        self._wanted.append((every, take))
        if self._step:
            self._stretches.append(_Stretch(self._current, every, take, self._clock))

    def step_returned(self, duration_s: float, *, trains: bool, num_samples: int) -> None:
        self._step += trains
        if self._step and len(self._stretches) < len(self._wanted):
            self._stretches = [
                _Stretch(self._current, every, take, self._clock) for every, take in self._wanted
            ]
            return
        told = False
        for stretch in self._stretches:
            stretch.add(duration_s, trains, num_samples)
            told |= stretch.end_if_full(self._step, self._extra)
        if told:
            self._extra = {}

    def note(self, values: Mapping[str, Any]) -> None:
        """Keeps numbers of the script for the next figures."""
        self._extra.update(values)

    def track(self, tracker: trackers.Tracker, every: int) -> None:
        """Sends figures to a tracker from now on."""
        self._trackers.append(tracker)
        self._want(every, tracker.write)

    def close(self) -> None:
        """Closes all trackers. A second call has no effect."""
        closing, self._trackers = self._trackers, []
        self._stretches, self._wanted = [], []
        for tracker in closing:
            try:
                tracker.close()
            except Exception as error:  # a tracker's trouble is not the end of a run
                _log.warning("smp.metrics.to: %s did not close: %s", type(tracker).__name__, error)

    @staticmethod
    def _write_line(step: int, values: dict[str, float]) -> None:
        first_rank_log.info("smp: %s", format_figures(step, values))


def step_log_of(current: runtime.Runtime) -> StepLog:
    """Returns the step log of a runtime."""
    log: StepLog = current.observers.of_kind(StepLog)
    return log


def to(target: Any, *, every: int | None = None, all_ranks: bool = False, **options: Any) -> None:
    """Sends figures of training steps to a tracker, from the next stretch of steps on.

    Not collective. Figures are those of the line in the log: ``step_ms`` (mean time of a training
    step, including the time between steps, ms), ``in_step`` (part of it within step functions),
    ``samples_per_s`` (over all replicas, if their batches are alike), ``bubble`` (part of the time
    in steps in which this rank could run nothing; pipelines), ``sent_mb`` (10^6 bytes per step,
    between ranks without the data-parallel reduction), ``rss_mb``, on GPUs ``device_mb`` (peak of
    tensors) and ``device_util`` (percent, by NVML), and the values passed to `log`. Names get the
    prefix ``smp/``. `smp.shutdown` or the end of the process closes the tracker.

    Args:
        target: "tensorboard" (options of ``SummaryWriter``, such as ``log_dir``), "wandb" (options
            of ``wandb.init``), "mlflow" (options of ``mlflow.start_run``); or a ``SummaryWriter``,
            a run of wandb, or a function ``(step, values)``.
        every: training steps of a stretch; by default ``SMP_METRICS_EVERY``, or 100 if that is 0.
        all_ranks: each rank sends its own figures; otherwise only global_rank 0 does.

    Raises:
        ValueError: ``every`` is not positive, or ``target`` is not a tracker.
        ImportError: the package of ``target`` is not installed.
        RuntimeError: ``smp.init`` was not called.
    """
    current = metrics._run()
    if every is None:
        every = current.rank.settings.metrics_every or 100
    if every < 1:
        raise ValueError(f"smp.metrics.to: every={every}; expected a number of steps above 0")
    if all_ranks or current.rank.global_rank == 0:
        step_log_of(current).track(trackers.make_tracker(target, options), every)


def log(**values: float | Tensor) -> None:
    """Adds numbers of the script to the next line and to trackers, such as ``log(loss=loss)``.

    The last value of a stretch counts. Tensors of one element are read when the stretch ends, so
    that no step waits for the device. Not collective; ranks without a log or tracker drop them.

    Raises:
        ValueError: a value is not a number or a tensor of one element.
        RuntimeError: ``smp.init`` was not called.
    """
    current = metrics._run()
    for name, value in values.items():
        is_one = isinstance(value, Tensor) and value.numel() == 1
        if not is_one and not isinstance(value, int | float):
            raise ValueError(
                f"smp.metrics.log: {name} is {type(value).__name__}; expected a number or a tensor "
                "of one element"
            )
    step_log_of(current).note(
        {name: v.detach() if isinstance(v, Tensor) else v for name, v in values.items()}
    )


def _number(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)
