"""Values that old scripts read in a 16-bit optimizer's saved state, and set on another one."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smp
from smp.precision import DynamicLossScaler, StaticLossScaler
from tests.unit.test_precision import make

KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step")
DYNAMIC = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2}}


def train(optimizer: Any, run: Any, steps: int) -> list[tuple[Tensor, float]]:
    seen = []
    for _ in range(steps):
        seen.append((run(), optimizer.loss_scale))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("how", ["mapping", "object"])
def test_a_script_resumes_by_the_keys_of_apex(start: Any, tmp_path: Path, how: str) -> None:
    """Resumes as the first GPT-2 script does: four values at once, the rest with the masters."""
    start(fp16=True)
    model, optimizer, run = make(**DYNAMIC)
    train(optimizer, run, 5)
    content = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    if how == "object":  # of a script that saves the scaler itself
        optimizer.loss_scaler.model = model
        known, optimizer.loss_scaler.model = optimizer.loss_scaler.model, None
        assert known is model
        content["optimizer"]["loss_scaler"] = copy.deepcopy(optimizer.loss_scaler)
    smp.save(content, str(tmp_path / "state.pt"))
    expected = train(optimizer, run, 4)
    smp.shutdown()

    start(fp16=True)
    other = {"init_scale": 2.0, "scale_window": 2 if how == "mapping" else 100}
    model, optimizer, run = make(dynamic_loss_scale=True, dynamic_loss_args=other)
    saved = smp.load(str(tmp_path / "state.pt"), weights_only=how == "mapping")
    state = saved["optimizer"]
    optimizer.loss_scaler = state["loss_scaler"]
    optimizer.loss_scaler.model = model
    optimizer.dynamic_loss_scale = state["dynamic_loss_scale"]
    optimizer.overflow = state["overflow"]
    optimizer.first_closure_call_this_step = state["first_closure_call_this_step"]
    assert optimizer.loss_scale == 2.0**6 * 4 and optimizer.overflow is False
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(state)
    for (loss, scale), (ours, our_scale) in zip(expected, train(optimizer, run, 4), strict=True):
        assert torch.equal(loss, ours) and scale == our_scale


@pytest.mark.parametrize("key", ["fp16", "bf16", "fp16_params"])
def test_states_of_16_bit_training_have_the_keys(start: Any, key: str) -> None:
    start(**{key: True})
    _, optimizer, run = make(static_loss_scale=8.0)
    for state in (optimizer.state_dict(), optimizer.local_state_dict()):
        assert set(KEYS) <= state.keys()
        assert state["dynamic_loss_scale"] is False and state["overflow"] is False
        optimizer.loss_scaler = state["loss_scaler"]
        optimizer.dynamic_loss_scale = state["dynamic_loss_scale"]
        optimizer.overflow = state["overflow"]
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    train(optimizer, run, 1)
    smp.shutdown()
    start()
    assert not set(KEYS) & make()[1].state_dict().keys()


def test_a_state_without_a_loss_scale_leaves_one_alone(start: Any) -> None:
    start(bf16=True)
    state = make()[1].local_state_dict()
    smp.shutdown()
    start(fp16=True)
    _, optimizer, _ = make(**DYNAMIC)
    optimizer.loss_scaler = state["loss_scaler"]
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 64.0


def test_a_set_overflow_is_told_and_decides_nothing(start: Any) -> None:
    start(fp16=True)
    _, optimizer, run = make(static_loss_scale=8.0)
    optimizer.overflow = True
    assert optimizer.overflow is True
    run()
    assert optimizer.overflow is False
    optimizer.overflow = True  # gradients that wait for their update
    before = optimizer.fp32_from_fp16_groups[0][0].clone()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not torch.equal(before, optimizer.fp32_from_fp16_groups[0][0])


def test_scalers_that_do_not_fit_are_refused(start: Any) -> None:
    start(fp16=True)
    _, optimizer, _ = make(static_loss_scale=8.0)
    optimizer.loss_scaler = StaticLossScaler(16.0)
    assert optimizer.loss_scale == 16.0
    with pytest.raises(ValueError, match="give dynamic_loss_scale=True to smp.Distributed"):
        optimizer.loss_scaler = DynamicLossScaler()
    with pytest.raises(ValueError, match="give dynamic_loss_scale=True to smp.Distributed"):
        optimizer.dynamic_loss_scale = True
    with pytest.raises(TypeError, match="got a float"):
        optimizer.loss_scaler = 4.0
