"""TensorBoard, Weights & Biases and MLflow, as they are; `requirements/trackers.txt` has them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smp


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"{name} is not installed; pip install -r requirements/trackers.txt",
    )


@pytest.fixture(autouse=True)
def _run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SMP_METRICS_EVERY", "0")
    smp.init({"microbatches": 1})
    yield
    smp.shutdown()


def train(num_steps: int = 5) -> None:
    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    for index in range(num_steps):
        smp.metrics.log(loss=float(index))
        train_step(torch.ones(4))


def scalars(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


@needs("tensorboard")
def test_tensorboard_gets_scalars_by_step(tmp_path: Path) -> None:
    smp.metrics.to("tensorboard", every=2, log_dir=str(tmp_path))
    train()
    smp.shutdown()
    found = scalars(tmp_path)
    assert {"smp/step_ms", "smp/samples_per_s", "smp/rss_mb", "smp/loss"} <= set(
        found.Tags()["scalars"]
    )
    assert [(e.step, e.value) for e in found.Scalars("smp/loss")] == [(3, 2.0), (5, 4.0)]
    assert all(event.value > 0 for event in found.Scalars("smp/step_ms"))


@needs("tensorboard")
def test_writer_of_the_script_is_used_and_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    smp.metrics.to(writer, every=2)
    train()
    smp.shutdown()
    writer.add_scalar("own", 3.0, 9)
    writer.close()
    found = scalars(tmp_path)
    assert [e.value for e in found.Scalars("own")] == [3.0]
    assert len(found.Scalars("smp/step_ms")) == 2


@needs("wandb")
def test_wandb_gets_figures_beside_those_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(mode="offline", dir=str(tmp_path), project="smp")
    smp.metrics.to("wandb", every=2)
    run.log({"own": 1.0}, step=1000)  # steps of the script are its own
    train()
    assert wandb.run is run, "the run of the script goes on"
    summary = dict(run.summary)
    smp.shutdown()
    run.finish()
    assert summary["smp/step"] == 5 and summary["smp/loss"] == 4.0 and summary["own"] == 1.0
    assert list(tmp_path.rglob("*.wandb")), "written by the package"


@needs("wandb")
def test_wandb_run_that_smp_began_is_finished_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    smp.metrics.to("wandb", every=2, mode="offline", dir=str(tmp_path), project="smp")
    assert wandb.run is not None
    train()
    smp.shutdown()
    assert wandb.run is None


@needs("mlflow")
def test_mlflow_gets_metrics_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    smp.metrics.to("mlflow", every=2, run_name="one")
    run = mlflow.active_run()
    assert run is not None
    train()
    smp.shutdown()
    assert mlflow.active_run() is None, "smp began it"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "smp/loss")
    assert [(m.step, m.value) for m in history] == [(3, 2.0), (5, 4.0)]


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, distribution in (("mlflow", "mlflow-skinny"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, name, None)
        words = f"{name} cannot be imported .*pip install {distribution}"
        with pytest.raises(ImportError, match=words):
            smp.metrics.to(name)
