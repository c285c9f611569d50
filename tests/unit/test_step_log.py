"""Figures of training steps that come by themselves: when, which, and to whom."""

from __future__ import annotations

import logging

import pytest
import torch

import smp
from smp.observe import step_log, trackers
from smp.observe.step_log import StepLog, format_figures
from smp.world import runtime

Written = list[tuple[int, dict[str, float]]]


@pytest.fixture
def written() -> Written:
    return []


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


pytestmark = pytest.mark.usefixtures("ends")


def make(monkeypatch: pytest.MonkeyPatch, every: str = "0") -> tuple[StepLog, Clock]:
    monkeypatch.setenv("SMP_METRICS_EVERY", every)
    smp.init()
    clock = Clock()
    return StepLog(runtime.current(), clock), clock


def run(log: StepLog, clock: Clock, count: int, **options: bool) -> None:
    """Steps of 0.1 s, with 0.1 s between them."""
    for _ in range(count):
        clock.now_s += 0.2
        log.step_returned(0.1, trains=options.get("trains", True), num_samples=8)


def test_stretch_of_steps_has_means_and_the_first_step_is_left_out(
    monkeypatch: pytest.MonkeyPatch, written: Written
) -> None:
    log, clock = make(monkeypatch)
    log.track(trackers.Function(lambda step, values: written.append((step, dict(values)))), 5)
    clock.now_s += 60.0  # it traces and partitions
    log.step_returned(60.0, trains=True, num_samples=8)
    run(log, clock, 10)
    assert [step for step, _ in written] == [6, 11]
    for _, values in written:
        assert values["step_ms"] == pytest.approx(200.0)
        assert values["in_step"] == pytest.approx(0.5)
        assert values["samples_per_s"] == pytest.approx(40.0)
        assert values["rss_mb"] > 10
        assert not {"bubble", "sent_mb", "device_mb", "device_util"} & values.keys(), "one CPU rank"


def test_evaluation_takes_time_and_is_no_training_step(
    monkeypatch: pytest.MonkeyPatch, written: Written
) -> None:
    log, clock = make(monkeypatch)
    log.track(trackers.Function(lambda step, values: written.append((step, dict(values)))), 2)
    run(log, clock, 1)
    run(log, clock, 1)
    run(log, clock, 3, trains=False)
    run(log, clock, 1)
    assert [step for step, _ in written] == [3]
    assert written[0][1]["step_ms"] == pytest.approx(500.0), "5 calls of 0.2 s, 2 of them steps"
    assert written[0][1]["samples_per_s"] == pytest.approx(16.0)


def test_takers_have_stretches_of_their_own_and_may_come_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, clock = make(monkeypatch)
    steps: dict[str, list[int]] = {"two": [], "three": []}
    log.track(trackers.Function(lambda step, _: steps["two"].append(step)), 2)
    run(log, clock, 3)
    log.track(trackers.Function(lambda step, _: steps["three"].append(step)), 3)
    run(log, clock, 6)
    assert steps == {"two": [3, 5, 7, 9], "three": [6, 9]}


def test_numbers_of_the_script_come_with_the_next_figures(
    monkeypatch: pytest.MonkeyPatch, written: Written
) -> None:
    monkeypatch.setenv("SMP_METRICS_EVERY", "0")
    smp.init({"microbatches": 2})
    smp.metrics.to(lambda step, values: written.append((step, dict(values))), every=2)

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    for index in range(5):
        loss = train_step(torch.full((4, 3), float(index))).reduce_mean()
        smp.metrics.log(loss=loss, lr=0.5)
    assert [step for step, _ in written] == [3, 5]
    # The value of the step before: the figures come when a step function returns.
    assert [values["loss"] for _, values in written] == [1 * 6.0, 3 * 6.0]
    assert written[0][1]["lr"] == 0.5 and written[0][1]["samples_per_s"] > 0
    with pytest.raises(ValueError, match="loss is str"):
        smp.metrics.log(loss="much")
    with pytest.raises(ValueError, match="loss is Tensor"):
        smp.metrics.log(loss=torch.ones(2))


def test_line_is_in_the_log_by_default_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "smp")
    monkeypatch.delenv("SMP_METRICS_EVERY", raising=False)
    smp.init({"microbatches": 1})

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    for _ in range(201):
        train_step(torch.ones(4))
    lines = [r.getMessage() for r in caplog.records if "step_ms=" in r.getMessage()]
    assert [line.split()[:2] for line in lines] == [["smp:", "step=101"], ["smp:", "step=201"]]
    caplog.clear()
    smp.shutdown()
    monkeypatch.setenv("SMP_METRICS_EVERY", "0")
    smp.init({"microbatches": 1})
    for _ in range(201):
        train_step(torch.ones(4))
    assert "step_ms=" not in caplog.text


def test_line_is_stable() -> None:
    values = {"step_ms": 12.3456, "in_step": 0.98765, "samples_per_s": 41.66, "loss": 1.23456789}
    assert (
        format_figures(7, values)
        == "step=7 step_ms=12.35 in_step=0.988 samples_per_s=41.7 loss=1.23457"
    )


def test_tracker_that_fails_to_close_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, _ = make(monkeypatch)
    closed = []

    class Broken(trackers.Function):
        def close(self) -> None:
            raise OSError("disk full")

    class Good(trackers.Function):
        def close(self) -> None:
            closed.append(1)

    log.track(Broken(print), 1)
    log.track(Good(print), 1)
    smp.shutdown()
    assert closed == [1]
    assert "Broken did not close: disk full" in caplog.text


def test_utilisation_is_left_out_where_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    from smp.observe.device_use import device_utilisation

    assert device_utilisation(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    assert device_utilisation(torch.device("cuda", 0)) == 87.0

    def without_package(device: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", without_package)
    assert device_utilisation(torch.device("cuda", 0)) is None


def test_wrong_arguments_are_refused() -> None:
    smp.init()
    with pytest.raises(ValueError, match="every=0; expected a number of steps above 0"):
        smp.metrics.to(print, every=0)
    with pytest.raises(ValueError, match="'comet' is not one of"):
        smp.metrics.to("comet")
    with pytest.raises(ValueError, match="got int"):
        smp.metrics.to(3)
    with pytest.raises(ValueError, match=r"the options \['log_dir'\] are for trackers"):
        smp.metrics.to(print, log_dir="runs")
    assert step_log.step_log_of(runtime.current())._trackers == []
