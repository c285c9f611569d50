"""The host does not wait for the GPU in a training step.

The same steps run on the CPU, where the host never waits, to show that they are steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import smp
from tests.gpu.device import DEVICE, needs_cuda, synchronize, waiting_is_an_error
from tests.gpu.host_waits import REGION, waits_in, waits_of
from tests.harness import train_step_of

OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": smp.optimizers.FusedAdam,
    "FusedLAMB": smp.optimizers.FusedLAMB,
    "FusedNovoGrad": smp.optimizers.FusedNovoGrad,
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
}


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    yield lambda **config: smp.init(config)
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
    batch = torch.randn(8, 64, device=DEVICE)
    train_step = train_step_of(model, lambda model, x: (model(x) - x).square().mean())

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


@pytest.mark.sample(keep=8)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", ["", "optimizer", "smp"])
@pytest.mark.parametrize("key", ["ddp", "bf16", "fp16"])
def test_a_step_works_where_synchronisation_is_an_error(
    start: Any, key: str, clip: str, kind: str
) -> None:
    start(**{key: True}, microbatches=2)
    step = make_step(kind, clip)
    step()
    with waiting_is_an_error():
        for _ in range(3):
            losses, optimizer = step()
        if DEVICE == "cuda":
            with pytest.raises(RuntimeError, match="synchroniz"):
                losses.reduce_mean().item()
    loss = losses.reduce_mean()
    assert torch.isfinite(loss) and loss.device.type == DEVICE
    if key == "fp16":
        assert optimizer.overflow and optimizer.loss_scale == 2.0**36


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_the_profiler_sees_no_wait_in_a_step(start: Any, key: str) -> None:
    start(**{key: True}, microbatches=2)
    step = make_step("FusedAdam", "optimizer")
    step()
    synchronize()

    def steps() -> None:
        for _ in range(3):
            step()

    assert waits_of(steps) == []


@needs_cuda
def test_the_profiler_sees_waits() -> None:
    x = torch.ones(3, device="cuda")
    assert waits_of(lambda: x.sum().item())


def test_waits_are_those_of_the_region() -> None:
    def event(name: str, start: float, end: float, device: str = "CPU") -> Any:
        time_range = SimpleNamespace(start=start, end=end)
        device_type = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, time_range=time_range, device_type=device_type)

    events = [
        event("cudaStreamSynchronize", 1, 2),
        event(REGION, 3, 9),
        event(REGION, 4, 20, "CUDA"),
        event("cudaMemcpy", 8, 30),
        event("cudaLaunchKernel", 5, 6),
        event("cudaDeviceSynchronize", 4, 5),
        event("cudaEventSynchronize", 9, 10),
    ]
    assert waits_in(events) == ["cudaDeviceSynchronize", "cudaMemcpy"]
