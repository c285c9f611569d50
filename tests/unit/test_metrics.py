"""The step meter: arithmetic, the stable line, the JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from smp.observe.metrics import (
    StepMeter,
    StepRecord,
    difference,
    format_line,
    resident_bytes,
    transformer_flops_per_token,
)


def clock_of(*times: float) -> Callable[[], float]:
    return iter(times).__next__


def make_meter(**options: object) -> StepMeter:
    defaults: dict[str, object] = {"tokens_per_step": 1000, "flops_per_token": 2e6, "every": 0}
    return StepMeter(**(defaults | options))  # type: ignore[arg-type]


def test_flops_per_token_follow_the_named_convention() -> None:
    # GPT-3 175B: 96 layers, width 12288, 2048 tokens; attention is 2.7 % on top of 6 N.
    flops = transformer_flops_per_token(175_000_000_000, 96, 12288, 2048)
    assert flops == 6 * 175e9 + 12 * 96 * 2048 * 12288


def test_rates_follow_from_the_given_duration() -> None:
    record = make_meter(peak_flops=1e10).record(step_s=0.5)
    assert record.step_ms == 500
    assert record.tokens_per_s == 2000
    assert record.model_tflops == pytest.approx(4e-3)
    assert record.mfu == pytest.approx(0.4)


def test_duration_is_measured_since_the_last_record_or_start() -> None:
    meter = make_meter(clock=clock_of(10.0, 12.0, 12.5, 100.0, 101.0))
    assert meter.record().step_ms == pytest.approx(2000)
    assert meter.record().step_ms == pytest.approx(500)
    meter.start()
    assert meter.record().step_ms == pytest.approx(1000)


def test_steps_are_counted_from_one() -> None:
    meter = make_meter()
    assert [meter.record(step_s=1.0).step for _ in range(3)] == [1, 2, 3]


def test_server_counters_become_bubble_and_traffic() -> None:
    server = {"idle_s": 0.1, "bytes_sent": 3_000_000, "messages_sent": 12, "contexts": 4}
    record = make_meter().record(step_s=0.4, server=server)
    assert record.bubble == pytest.approx(0.25)
    assert record.sent_mb == pytest.approx(3.0)
    assert record.messages_sent == 12


def test_unknown_figures_are_nan_and_not_zero() -> None:
    record = make_meter().record(step_s=1.0)
    for value in (record.mfu, record.bubble, record.sent_mb, record.messages_sent):
        assert math.isnan(value)


def test_resident_memory_grows_with_what_is_allocated() -> None:
    before = resident_bytes()
    kept = torch.ones(16_000_000)  # 64 MB, written to
    assert resident_bytes() - before > 0.9 * kept.numel() * kept.element_size()


def test_line_has_all_keys_in_a_fixed_order() -> None:
    lines: list[str] = []
    meter = make_meter(every=1, write=lines.append)
    meter.record(step_s=0.5, server={"messages_sent": 3}, extra={"loss": 2.5})
    keys = [part.split("=")[0] for part in lines[0].split()]
    assert keys == [field.name for field in fields(StepRecord)] + ["loss"]
    assert all(math.isnan(float(v)) or float(v) >= 0 for _, v in map(_pair, lines[0].split()))


def _pair(part: str) -> list[str]:
    return part.split("=")


def test_line_is_exactly_this_text() -> None:
    record = StepRecord(7, 12.5, 2000.0, 0.004, 0.4, 0.25, 3.0, 12, 64.0, 0.0)
    assert format_line(record, {"loss": 1 / 3}) == (
        "step=7 step_ms=12.50 tokens_per_s=2000.0 model_tflops=0.004 mfu=0.4000 bubble=0.2500 "
        "sent_mb=3.000 messages_sent=12 rss_mb=64.0 device_mb=0.0 loss=0.333333"
    )


@pytest.mark.parametrize(("every", "num_lines"), [(0, 0), (1, 6), (2, 3), (4, 1)])
def test_every_nth_step_writes_a_line(every: int, num_lines: int) -> None:
    lines: list[str] = []
    meter = make_meter(every=every, write=lines.append)
    for _ in range(6):
        meter.record(step_s=1.0)
    assert len(lines) == num_lines


def test_json_lines_hold_every_step_and_null_for_unknown(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')  # of an earlier run
    meter = make_meter(every=0, jsonl_path=path)
    for loss in (3.0, math.inf):
        meter.record(step_s=0.25, server={"idle_s": 0.05}, extra={"loss": loss})
    earlier, first, second = map(json.loads, path.read_text().splitlines())
    assert earlier == {"step": 0}
    assert (first["step"], first["loss"], first["step_ms"]) == (1, 3.0, 250.0)
    assert first["bubble"] == pytest.approx(0.2)
    assert first["mfu"] is None
    assert second["loss"] is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tokens_per_step": 0}, "tokens_per_step"),
        ({"flops_per_token": math.nan}, "flops_per_token"),
        ({"peak_flops": -1.0}, "peak_flops"),
        ({"every": -1}, "every"),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make_meter(**options)


def test_step_without_duration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step_s=0\.0"):
        make_meter().record(step_s=0.0)


def test_extra_may_not_hide_a_figure() -> None:
    with pytest.raises(ValueError, match="step_ms"):
        make_meter().record(step_s=1.0, extra={"step_ms": 3.0})


def test_difference_of_running_totals_gives_those_of_a_step() -> None:
    before = {"idle_s": 1.0, "bytes_sent": 100}
    after = {"idle_s": 1.5, "bytes_sent": 300}
    assert difference(after, before) == {"idle_s": 0.5, "bytes_sent": 200}
