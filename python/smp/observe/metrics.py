"""What a training step costs: time, tokens, model FLOPs, memory, idle time and traffic.

`server_stats` counts what this rank has done. `StepMeter` turns measurements into one stable
``key=value`` line and JSON lines. Nothing here talks to other ranks: each rank that wants figures
asks for its own.
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
"""Counters by name, as `server_stats` gives them."""

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
    """Running totals of this rank; two calls and `difference` give those of a step.

    Returns:
        - ``idle_s``: within steps, while this rank could run nothing.
        - ``contexts``, ``switches``: executions started, and changes from one to another.
        - ``remote_calls``, ``served_calls``: modules run elsewhere for this rank, and here for
          others.
        - ``headers``: messages that told others what to do; ``pushes``: orders
          to send a tensor on; ``fetches``: waits for the data of another rank; ``data_bytes``:
          tensors sent.
        - ``stored``: tensors kept now for others; 0 between steps.
        - ``records``: calls kept now for their backward; 0 between steps.
        - ``messages_sent``, ``bytes_sent``, ``messages_received``, ``bytes_received``: between
          this rank and all others, without the data-parallel reduction; with
          ``shared_memory_`` in front: the part of it that went through shared memory.
        - ``lane_tensors_sent``, ``lane_bytes_sent``, ``lane_tensors_received``: tensors that went
          over lanes between devices; ``lane_times_full``, ``lane_times_too_large``: those of
          the first that had to go through the host because no slot was free, or none large enough
          (``SMP_LANE_SLOT_MB``). All are 0 on the CPU.

        All are 0 with one pipeline rank or before the partition; traffic with one process.

    Raises:
        RuntimeError: before ``smp.init``.
    """
    return stats_of(_run())


def stats_of(current: runtime.Runtime) -> dict[str, float]:
    """`server_stats` of a runtime."""
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
    """What `offload_activations` has done on this rank since ``smp.init``; empty without it.

    Returns:
        - ``checkpoints``: forwards of checkpointed modules.
        - ``offloaded``, ``bytes_offloaded``: tensors that went to host memory; ``stayed``: that
          were needed within ``activation_loading_horizon`` tasks.
        - ``loaded_ahead``, ``loaded_late``: came back before they were needed, or only then.
        - ``slots``, ``host_bytes``: of the pool in host memory; with ``_in_use``: now (0 between
          steps), with ``peak_`` in front: at most.

    Raises:
        RuntimeError: before ``smp.init``.
    """
    store = _run().activation_store
    return {} if store is None else store.stats()


def difference(after: Counters, before: Counters) -> dict[str, float]:
    """``after - before`` by name."""
    return {name: value - before[name] for name, value in after.items()}


def executed_order() -> list[str]:
    """Tasks of the last step in the order in which they began on this rank.

    Empty with one pipeline rank or before the partition.
    """
    server = _run().server
    return [] if server is None else server.executed_order()


def executed_schedule() -> str:
    """What this rank did in the last step, in the text form of `smp.schedule`: ``"0: F0 F1 B0"``.

    The lines of all pipeline ranks together are a schedule, which can be compared with a plan. The
    driver's backward stands where gradients came to its own modules; it has no ``W``, since nobody
    waits for gradients of its inputs. Arithmetic and losses that run at the home of their tensors
    belong to no action. Empty with one pipeline rank or before the partition.
    """
    current = _run()
    if current.server is None:
        return ""
    return f"{current.rank.ranks['pp']}: {current.server.executed_actions()}".rstrip()


def transformer_flops_per_token(
    num_params: int, num_layers: int, hidden: int, seq_len: int
) -> float:
    """Model FLOPs of training on one token: ``6 N + 12 L s h``.

    The convention of the PaLM report (arXiv:2204.02311, appendix B): forward and backward take 2
    and 4 FLOPs per parameter and token, attention scores and their product with the values
    ``12 * num_layers * seq_len * hidden`` without regard to the causal mask. Recomputation does not
    count. Parameters of embeddings that are only looked up may be left out of ``num_params``.

    Args:
        num_params: parameters of the whole model, over all ranks.
        num_layers: transformer layers.
        hidden: width of the model (heads times head size).
        seq_len: tokens per sequence.
    """
    return 6.0 * num_params + 12.0 * num_layers * seq_len * hidden


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        raise RuntimeError(
            "memory use is read from /proc/self/statm, which this system does not have; "
            "smp supports Linux"
        ) from None
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_peak_bytes() -> int:
    """Most memory that tensors took on the current CUDA device since the start; 0 without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


@dataclass(frozen=True)
class StepRecord:
    """Figures of one step; NaN where the meter was not told enough."""

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
    """Sent by this rank, in 10^6 bytes."""
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
    """``step=1 step_ms=12.50 ...``: all keys of `StepRecord` in their order, then ``extra``."""
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
        jsonl_path: every record is appended to this file as a JSON line (NaN as null); the folder
            must exist.
        every: a line is written for each ``every``-th step; 0 writes none.
        write: takes the line.
        clock: seconds, increasing.

    Raises:
        ValueError: for a number that is not positive (``every``: negative).
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
            step_s: its duration; by default the time since the last `record` or `start`.
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
