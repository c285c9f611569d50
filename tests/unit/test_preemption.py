"""Checkpoints that the library saves by itself when all ranks are to stop, in one process."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.world import preemption

INSTALL_HANDLER = preemption._install_handler


@pytest.fixture(autouse=True)
def initialized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(preemption, "_install_handler", lambda: None)  # pytest keeps its SIGTERM
    monkeypatch.setattr(preemption._Process, "automatic", None)
    smp.init({})
    preemption.save_to(tmp_path)
    yield
    smp.shutdown()


def make_model() -> smp.DistributedModel:
    return smp.DistributedModel(nn.Linear(3, 2))


def make_optimizer(model: nn.Module) -> smp.DistributedOptimizer:
    return smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))


@smp.step
def train_step(models: list[smp.DistributedModel], x: torch.Tensor) -> torch.Tensor:
    for model in models:
        model.backward(model(x).square().mean())
    return x


def train(models: list[smp.DistributedModel], *optimizers: smp.DistributedOptimizer) -> None:
    train_step(models, torch.ones(2, 3))
    for optimizer in optimizers:
        optimizer.step()


def test_one_model_with_its_optimizer_is_saved(tmp_path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    train([model], optimizer)
    preemption.request()
    with pytest.raises(SystemExit) as caught:
        train([model], optimizer)
    assert caught.value.code == preemption.EXIT_RESUME
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    smp.resume_from_checkpoint(tmp_path)
    assert all(map(torch.equal, model.parameters(), saved)) and saved[0].any()


def test_what_would_be_lost_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = make_model()
    optimizers = [make_optimizer(model), make_optimizer(model)]
    with pytest.raises(RuntimeError, match=r"1 models \(.*\) and 2 optimizers .*_requested"):
        train([model], *optimizers)
    del optimizers
    other = make_model()
    with pytest.raises(RuntimeError, match=r"2 models \(.*\) and 0 optimizers .*_requested"):
        train([model, other])
    with torch.no_grad():
        smp.step(lambda x: other(x))(torch.ones(2, 3))  # nothing of this would be saved
    preemption._Process.automatic = None
    train([model, other])


def test_one_optimizer_wrapped_again_is_one(tmp_path: Path) -> None:
    model = make_model()
    first = make_optimizer(model)
    second = smp.DistributedOptimizer(first)
    train([model], second)


def test_what_nobody_has_any_more_does_not_count(tmp_path: Path) -> None:
    model = make_model()
    gc.disable()
    try:
        old: Any = make_optimizer(model)
        old.cycle = old
        del old
        optimizer = make_optimizer(model)
        assert len(smp.world.runtime.current().wrapped.optimizers) == 2
        train([model], optimizer)
        assert smp.world.runtime.current().wrapped.optimizers == [optimizer]
    finally:
        gc.enable()


def test_steps_beside_the_main_thread_say_once_that_sigterm_is_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preemption._Process, "has_handler", False)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(preemption, "_install_handler", INSTALL_HANDLER)
    answers = []

    def loop() -> None:
        answers.extend([preemption.requested(), preemption.requested()])
        preemption.request()
        answers.append(preemption.requested())

    thread = threading.Thread(target=loop, name="train loop")
    with caplog.at_level("WARNING", logger="smp"):
        thread.start()
        thread.join()
    assert answers == [False, False, True]
    assert signal.getsignal(signal.SIGTERM) is before
    said = [one.getMessage() for one in caplog.records if "SIGTERM" in one.getMessage()]
    assert len(said) == 1 and "'train loop'" in said[0] and "preemption.request()" in said[0]
