"""Measures training steps: time, tokens, model FLOPs, memory, idle time and traffic.

`server_stats` counts what this rank has done. `StepMeter` turns measurements into a stable
``key=value`` line and JSON lines. Nothing here communicates: each rank measures itself.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from smp.world import runtime

Counters = Mapping[str, float]
"""Counters by name, as returned by `server_stats`."""

_LANE_COUNTERS = (
    "lane_tensors_sent",
    "lane_bytes_sent",
    "lane_tensors_received",
    "lane_times_full",
    "lane_times_too_large",
)
_SERVER_COUNTERS = (
    *("idle_s", "contexts", "switches", "remote_calls", "served_calls", "records", "stored"),
    *("headers", "pushes", "fetches", "data_bytes"),
)


def _run() -> runtime.Runtime:
    return runtime.current()


def server_stats() -> dict[str, float]:
    """Returns running totals of this rank; `difference` of two calls gives those of a step.

    Returns:
        - ``idle_s``: seconds within steps in which this rank could run nothing.
        - ``contexts``, ``switches``: executions started, and changes from one to another.
        - ``remote_calls``, ``served_calls``: modules run elsewhere for this rank, and here for
          others.
        - ``headers``: messages with instructions for other ranks; ``pushes``: orders to send a
          tensor on; ``fetches``: waits for the data of another rank; ``data_bytes``: bytes of
          tensors sent.
        - ``stored``: tensors kept now for other ranks; 0 between steps.
        - ``records``: calls kept now for their backward; 0 between steps.
        - ``messages_sent``, ``bytes_sent``, ``messages_received``, ``bytes_received``: traffic
          between this rank and all others, without the data-parallel reduction; with the prefix
          ``shared_memory_``: the part of it that went through shared memory.
        - ``lane_tensors_sent``, ``lane_bytes_sent``, ``lane_tensors_received``: tensors that went
          over lanes between devices; ``lane_times_full``, ``lane_times_too_large``: tensors
          that were sent through the host because no slot was free, or none was large enough
          (``SMP_LANE_SLOT_MB``). All are 0 on the CPU.

        All are 0 with one pipeline rank or before the partition; traffic is 0 with one process.

    Raises:
        RuntimeError: ``smp.init`` was not called.
    """
    return stats_of(_run())


def stats_of(current: runtime.Runtime) -> dict[str, float]:
    """Returns `server_stats` of a runtime."""
    stats = dict.fromkeys(_SERVER_COUNTERS, 0.0)
    if current.server is not None:
        stats.update(current.server.stats())
    traffic = None if current.rank.mailbox is None else current.rank.mailbox.stats()
    for name in ("messages_sent", "bytes_sent", "messages_received", "bytes_received"):
        for part in (name, f"shared_memory_{name}"):
            stats[part] = 0 if traffic is None else traffic[part]
    for name in _LANE_COUNTERS:
        stats[name] = 0 if traffic is None else traffic[name]
    return stats


def offload_stats() -> dict[str, int]:
    """Returns counters of `offload_activations` since ``smp.init``; empty without offloading.

    Returns:
        - ``checkpoints``: forwards of checkpointed modules.
        - ``offloaded``, ``bytes_offloaded``: tensors that were copied to host memory; ``stayed``:
          tensors that were needed within ``activation_loading_horizon`` tasks.
        - ``loaded_ahead``, ``loaded_late``: tensors that came back before they were needed, or only
          then.
        - ``slots``, ``host_bytes``: size of the pool in host memory; with the suffix ``_in_use``:
          used now (0 between steps), with the prefix ``peak_``: the largest use.

    Raises:
        RuntimeError: ``smp.init`` was not called.
    """
    store = _run().activation_store
    return {} if store is None else store.stats()


def difference(after: Counters, before: Counters) -> dict[str, float]:
    """Returns ``after - before`` by name."""
    return {name: value - before[name] for name, value in after.items()}


def executed_order() -> list[str]:
    """Returns the tasks of the last step in the order in which they began on this rank.

    The list is empty with one pipeline rank or before the partition.
    """
    server = _run().server
    return [] if server is None else server.executed_order()


def executed_schedule() -> str:
    """Returns this rank's actions in the last step as text of `smp.schedule`: ``"0: F0 F1 B0"``.

    The lines of all pipeline ranks together are a schedule, which can be compared with a plan. The
    driver's backward is listed where gradients came to its own modules. It has no ``W``, since no
    rank waits for gradients of its inputs. Arithmetic and losses that run at the home of their
    tensors belong to no action. The text is empty with one pipeline rank or before the partition.
    """
    current = _run()
    if current.server is None:
        return ""
    return f"{current.rank.ranks['pp']}: {current.server.executed_actions()}".rstrip()


def transformer_flops_per_token(
    num_params: int, num_layers: int, hidden: int, seq_len: int
) -> float:
    """Returns model FLOPs of training on one token: ``6 N + 12 L s h``.

    This is the convention of the PaLM report (arXiv:2204.02311, appendix B): forward and backward
    take 2 and 4 FLOPs per parameter and token; attention scores and their product with the values
    take ``12 * num_layers * seq_len * hidden``, without regard to the causal mask. Recomputation
    does not count. Parameters of embeddings that are only looked up may be left out of
    ``num_params``.

    Args:
        num_params: parameters of the whole model, over all ranks.
        num_layers: transformer layers.
        hidden: width of the model (heads times head size).
        seq_len: tokens per sequence.
    """
    return 6.0 * num_params + 12.0 * num_layers * seq_len * hidden


def resident_bytes() -> int:
    """Returns the bytes of this process that are in RAM."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        raise RuntimeError(
            "memory use is read from /proc/self/statm, which this system does not have; "
            "smp supports Linux"
        ) from None
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_peak_bytes() -> int:
    """Returns the peak bytes of tensors on the current CUDA device since the start, or 0."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


@dataclass(frozen=True)
class StepRecord:
    """Figures of one step; NaN for figures that the meter cannot compute."""

    step: int
    """Counted from 1."""
    step_ms: float
    tokens_per_s: float
    model_tflops: float
    """Model FLOPs per second, in units of 10^12."""
    mfu: float
    """Model FLOPs per second as a fraction of the peak."""
    bubble: float
    """Fraction of the step in which this rank could run nothing."""
    sent_mb: float
    """Bytes sent by this rank, in units of 10^6."""
    messages_sent: float
    rss_mb: float
    """Resident memory of this process, in 10^6 bytes."""
    device_mb: float
    """Peak of tensor memory on the device, in 10^6 bytes."""


_FORMATS = {
    "step": "d",
    "step_ms": ".2f",
    "tokens_per_s": ".1f",
    "model_tflops": ".4g",
    "mfu": ".4f",
    "bubble": ".4f",
    "sent_mb": ".3f",
    "messages_sent": ".0f",
    "rss_mb": ".1f",
    "device_mb": ".1f",
}


def format_line(record: StepRecord, extra: Mapping[str, float] | None = None) -> str:
    """Formats ``step=1 step_ms=12.50 ...``: all keys of `StepRecord` in order, then ``extra``."""
    values = asdict(record)
    parts = [f"{key}={values[key]:{spec}}" for key, spec in _FORMATS.items()]
    parts += [f"{key}={value:.6g}" for key, value in (extra or {}).items()]
    return " ".join(parts)


class StepMeter:
    """Measures training steps and reports them.

    Args:
        tokens_per_step: tokens of one step over all data-parallel ranks.
        flops_per_token: model FLOPs per token, see `transformer_flops_per_token`.
        peak_flops: FLOPs per second of all devices together at the precision in use; without it
            ``mfu`` is NaN.
        jsonl_path: file to which every record is appended as a JSON line (NaN as null); the folder
            must exist.
        every: interval of steps in which a line is written; 0 writes none.
        write: function that is called with the line.
        clock: function that returns increasing seconds.

    Raises:
        ValueError: a number is not positive (``every``: negative).
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None = None,
        jsonl_path: str | Path | None = None,
        every: int = 1,
        write: Callable[[str], object] = print,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check_positive("tokens_per_step", tokens_per_step)
        _check_positive("flops_per_token", flops_per_token)
        if peak_flops is not None:
            _check_positive("peak_flops", peak_flops)
        if every < 0:
            raise ValueError(f"StepMeter: every={every}; expected 0 (no lines) or more")
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._jsonl_path = None if jsonl_path is None else Path(jsonl_path)
        self._every = every
        self._write = write
        self._clock = clock
        self._num_steps = 0
        self._lap_s = clock()

    def start(self) -> None:
        """Starts the clock of the next step, e.g. after an evaluation between two steps."""
        self._lap_s = self._clock()

    def record(
        self,
        step_s: float | None = None,
        server: Counters | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> StepRecord:
        """Ends a step.

        Args:
            step_s: duration in seconds; by default the time since the last `record` or `start`.
            server: counters of this step (not running totals); missing ones become NaN.
            extra: further numbers for the end of the line and for the JSON object, e.g. the loss.

        Raises:
            ValueError: ``step_s`` is not positive, or ``extra`` reuses a key of `StepRecord`.
        """
        now_s = self._clock()
        duration_s = now_s - self._lap_s if step_s is None else step_s
        self._lap_s = now_s
        _check_positive("step_s", duration_s)
        if reused := sorted(set(extra or ()) & _FORMATS.keys()):
            raise ValueError(f"StepMeter: extra reuses the keys {reused}; name them otherwise")
        self._num_steps += 1
        record = self._make_record(duration_s, server or {})
        if self._every and self._num_steps % self._every == 0:
            self._write(format_line(record, extra))
        if self._jsonl_path is not None:
            with self._jsonl_path.open("a", encoding="utf-8") as file:
                file.write(_json_line({**asdict(record), **(extra or {})}) + "\n")
        return record

    def _make_record(self, duration_s: float, server: Counters) -> StepRecord:
        tokens_per_s = self._tokens_per_step / duration_s
        flops_per_s = tokens_per_s * self._flops_per_token
        return StepRecord(
            step=self._num_steps,
            step_ms=duration_s * 1e3,
            tokens_per_s=tokens_per_s,
            model_tflops=flops_per_s * 1e-12,
            mfu=flops_per_s / self._peak_flops if self._peak_flops else math.nan,
            bubble=server.get("idle_s", math.nan) / duration_s,
            sent_mb=server.get("bytes_sent", math.nan) * 1e-6,
            messages_sent=server.get("messages_sent", math.nan),
            rss_mb=resident_bytes() * 1e-6,
            device_mb=device_peak_bytes() * 1e-6,
        )


def _json_line(values: Mapping[str, float]) -> str:
    return json.dumps({k: v if math.isfinite(v) else None for k, v in values.items()})


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"StepMeter: {name}={value}; expected a finite number above 0")
