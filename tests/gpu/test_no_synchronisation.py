"""The host does not wait for the GPU in a training step. Skipped without a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": smp.optimizers.FusedAdam,
    "FusedLAMB": smp.optimizers.FusedLAMB,
    "FusedNovoGrad": smp.optimizers.FusedNovoGrad,
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
}
# Calls of the CUDA runtime for which the host waits.
WAITS = {
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaStreamSynchronize",
}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setenv("SMP_DEVICE", "cuda")
    yield lambda **config: smp.init(config)
    torch.cuda.set_sync_debug_mode("default")
    smp.shutdown()


def make_step(kind: str, clip: str) -> Callable[[], tuple[Any, smp.DistributedOptimizer]]:
    """A function that does a whole training step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    model = smp.DistributedModel(nn.Sequential(*blocks))
    optimizer = smp.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters(), lr=1e-3),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**40},  # some steps overflow
    )
    batch = torch.randn(8, 64, device="cuda")

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss: Tensor = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    def step() -> tuple[Any, smp.DistributedOptimizer]:
        losses = train_step(batch)
        if clip == "optimizer":
            optimizer.clip_master_grads(1e-3)
        elif clip == "smp":
            smp.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        return losses, optimizer

    return step


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", ["", "optimizer", "smp"])
@pytest.mark.parametrize("key", ["ddp", "bf16", "fp16"])
def test_a_step_works_where_synchronisation_is_an_error(
    start: Any, key: str, clip: str, kind: str
) -> None:
    start(**{key: True}, microbatches=2)
    step = make_step(kind, clip)
    step()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        losses, optimizer = step()
    with pytest.raises(RuntimeError, match="synchroniz"):
        losses.reduce_mean().item()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(losses.reduce_mean())
    if key == "fp16":
        assert optimizer.overflow and optimizer.loss_scale == 2.0**36


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_the_profiler_sees_no_wait_in_a_step(start: Any, key: str) -> None:
    start(**{key: True}, microbatches=2)
    step = make_step("FusedAdam", "optimizer")
    step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("steps"):
            for _ in range(3):
                losses, _ = step()
        with torch.profiler.record_function("read"):
            losses.reduce_mean().item()
    events = list(profile.events())

    def waits_in(name: str) -> list[str]:
        [region] = [e for e in events if e.name == name and e.device_type.name == "CPU"]
        return [
            e.name
            for e in events
            if e.name in WAITS
            and region.time_range.start <= e.time_range.start < region.time_range.end
        ]

    assert waits_in("read"), "it sees waits"
    assert waits_in("steps") == []
