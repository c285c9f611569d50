"""A training step leaves norms, loss scales and overflows on the device."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import train_step_of
from tests.reference.host_reads import count_host_reads
from tests.reference.loss_scale import scale_trace

SCALING: dict[str, Any] = {"init_scale": 16.0, "scale_window": 2}
FUSED: list[Any] = [
    smp.optimizers.FusedAdam,
    smp.optimizers.FusedLAMB,
    smp.optimizers.FusedNovoGrad,
    lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
]


@pytest.fixture(autouse=True)
def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what reads numbers of the steps 1, 4, 16 and 64."""
    monkeypatch.setenv("SMP_CHECK_FIRST_STEP", "0")


class Training:
    """A small model whose gradients are infinite when told to."""

    def __init__(self, make_inner: Any, **arguments: Any) -> None:
        torch.manual_seed(3)
        self.overflows = False
        first = nn.Linear(5, 8)
        self.plain = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 2))
        self.model = smp.DistributedModel(self.plain)
        inner = make_inner(self.model.parameters(), lr=0.05)
        self.optimizer = smp.DistributedOptimizer(inner, **arguments)
        first.weight.register_hook(
            lambda grad: torch.full_like(grad, math.inf) if self.overflows else grad
        )
        run = train_step_of(self.model)
        self._run = run

    def step(self, clip: str = "", overflows: bool = False) -> Tensor | None:
        """Runs a step with its update, and returns the norm if it clips."""
        self.overflows = overflows
        self._run(torch.arange(30.0).view(6, 5) / 30)
        norm = None
        if clip == "optimizer":
            norm = self.optimizer.clip_master_grads(1e-3)
        elif clip == "smp":
            norm = smp.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def values(self) -> list[Tensor]:
        """Returns copies of all tensors that an update may change."""
        inner = self.optimizer.optimizer
        params = [p for group in inner.param_groups for p in group["params"]]
        states = [v for p in params for v in inner.state[p].values()]
        return [v.detach().clone() for v in [*self.plain.parameters(), *params, *states]]


def reads_of(training: Training, clip: str, num_steps: int = 3) -> Counter[str]:
    training.step(clip)  # the first one makes state
    with count_host_reads() as reads:
        for i in range(num_steps):
            training.step(clip, overflows=training.optimizer._is_scaled and i == 1)
    return reads


@pytest.mark.parametrize("make_inner", FUSED)
@pytest.mark.parametrize("clip", ["", "optimizer", "smp"])
@pytest.mark.parametrize("key", ["ddp", "bf16", "fp16"])
def test_no_step_with_a_fused_optimizer_reads_a_number(
    start: Any, key: str, clip: str, make_inner: Any
) -> None:
    start(**{key: True}, microbatches=2)
    training = Training(make_inner, dynamic_loss_scale=True, dynamic_loss_args=SCALING)
    before = training.values()
    assert reads_of(training, clip) == Counter()
    assert not all(map(torch.equal, before, training.values()))


@pytest.mark.parametrize("key", ["ddp", "bf16", "fp16"])
def test_another_optimizer_reads_once_per_step_in_fp16(start: Any, key: str) -> None:
    start(**{key: True}, microbatches=2)
    training = Training(torch.optim.SGD, dynamic_loss_scale=True, dynamic_loss_args=SCALING)
    expected = {"aten::_local_scalar_dense": 3} if key == "fp16" else {}
    assert reads_of(training, "optimizer", num_steps=3) == Counter(expected)


@pytest.mark.parametrize("make_inner", FUSED)
@pytest.mark.parametrize("clip", ["", "optimizer"])
def test_an_overflow_is_skipped_on_the_device(start: Any, make_inner: Any, clip: str) -> None:
    start(fp16=True)
    training = Training(make_inner, dynamic_loss_scale=True, dynamic_loss_args=SCALING)
    optimizer = training.optimizer
    assert optimizer.overflow is False and optimizer.step_was_skipped is False
    history = [False, True, False, False, False, True, True, False]
    scales, skips = [], []
    for overflows in history:
        before = training.values()
        norm = training.step(clip, overflows)
        after = training.values()
        skips.append(len(before) == len(after) and all(map(torch.equal, before, after)))
        scales.append(optimizer.loss_scale)
        assert optimizer.overflow is overflows and optimizer.step_was_skipped is overflows
        if norm is not None:
            assert norm.shape == () and norm.dtype == torch.float32
            assert float(norm) == -1.0 if overflows else 1e-3 < float(norm) < math.inf
    assert skips == history
    assert scales == scale_trace(history, **SCALING)
    [step, *_] = (s["step"] for s in optimizer.state.values())
    assert float(step) == history.count(False)


@pytest.mark.parametrize("make_inner", FUSED)
def test_a_skipped_first_update_leaves_nothing_behind(start: Any, make_inner: Any) -> None:
    start(fp16=True)
    results = []
    for history in ([True, True, False, False], [False, False]):
        training = Training(make_inner, static_loss_scale=16.0)
        for overflows in history:
            training.step("optimizer", overflows)
        results.append(training.values())
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_flags_stay_what_they_were_when_they_are_read_late(start: Any) -> None:
    start(fp16=True)
    training = Training(smp.optimizers.FusedAdam, static_loss_scale=16.0)
    flags = []
    for overflows in (True, False, True):
        training.step("", overflows)
        flags.append(training.optimizer._skipped)
    with count_host_reads() as reads:
        assert [bool(flag) for flag in flags] == [True, False, True]
        assert [bool(flag) for flag in flags] == [True, False, True]
    assert reads == Counter({"aten::_local_scalar_dense": 3}), "each is read once"


def test_a_scale_that_a_script_sets_counts_from_the_next_step(start: Any) -> None:
    start(fp16=True)
    training = Training(
        smp.optimizers.FusedAdam, dynamic_loss_scale=True, dynamic_loss_args=SCALING
    )
    training.step()
    training.optimizer.loss_scale = 4.0
    assert training.optimizer.loss_scale == 4.0
    training._run(torch.arange(30.0).view(6, 5) / 30)
    assert float(training.optimizer._gradients.divisor) == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_reads_only_for_what_is_not_fused(start: Any, fused: bool) -> None:
    start()
    training = Training(lambda params, lr: torch.optim.SGD(params, lr=lr, fused=fused))
    scaler = smp.amp.GradScaler(init_scale=16.0)

    def step() -> None:
        loss = training.model(torch.ones(6, 5)).square().mean()
        training.model.backward(scaler.scale(loss))
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()

    step()
    with count_host_reads() as reads:
        step()
    assert reads == (Counter() if fused else Counter({"aten::_local_scalar_dense": 1}))
