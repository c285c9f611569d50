"""Progress bar and step metrics for `finetune.py`."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import smp
from smp.observe.metrics import StepMeter, difference, server_stats, transformer_flops_per_token

NUM_LINES = 6


class Display:
    """Bar with loss, tokens per second and memory on rank 0; metrics of every rank to a file.

    Args:
        model: a Hugging Face causal language model, wrapped.
        num_steps: number of steps of the whole run.
        num_sequences: sequences of one step, over all data-parallel ranks.
        out: folder for `metrics_<rank>.jsonl`, or None.
    """

    def __init__(
        self,
        model: smp.DistributedModel,
        num_steps: int,
        num_sequences: int,
        seq_len: int,
        out: Path | None,
    ) -> None:
        is_rank0 = smp.rank() == 0
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[tokens_per_s]:,.0f} tokens/s"),
            TextColumn("{task.fields[memory_mb]:,.0f} MB"),
            TimeElapsedColumn(),
            disable=not is_rank0,
        )
        self._task = self._progress.add_task(
            "", total=num_steps, loss=math.nan, tokens_per_s=math.nan, memory_mb=math.nan
        )
        num_params = sum(parameter.numel() for parameter in model.parameters())
        config = model.config
        self._meter = StepMeter(
            tokens_per_step=num_sequences * seq_len,
            flops_per_token=transformer_flops_per_token(
                num_params, config.num_hidden_layers, config.hidden_size, seq_len
            ),
            jsonl_path=out / f"metrics_{smp.rank()}.jsonl" if out else None,
            every=math.ceil(num_steps / NUM_LINES) if is_rank0 else 0,
            write=lambda line: self._progress.console.print(line, highlight=False, soft_wrap=True),
        )

    def __enter__(self) -> Display:
        self._progress.start()
        self._counters = server_stats()
        self._meter.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, loss: float) -> None:
        """Ends a step."""
        before, self._counters = self._counters, server_stats()
        record = self._meter.record(server=difference(self._counters, before), extra={"loss": loss})
        self._progress.update(
            self._task,
            advance=1,
            loss=loss,
            tokens_per_s=record.tokens_per_s,
            memory_mb=record.rss_mb + record.device_mb,
        )
