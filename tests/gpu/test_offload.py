"""Offloading: the same bits, and on a GPU less memory, with copies beside the compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import smp
from tests.gpu.device import DEVICE, synchronize
from tests.harness import train_step_of

LAYERS = 12
# An activation is offloaded from 1 MiB on.
HIDDEN, TOKENS = (1024, 4096) if DEVICE == "cuda" else (64, 4096)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Memory:
    """Measures the growth of a GPU's memory in use, from the beginning to its peak."""

    def __init__(self) -> None:
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def peak(self) -> int:
        synchronize()
        return torch.cuda.max_memory_allocated() - self._before if DEVICE == "cuda" else 0


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    smp.shutdown()


def train(
    offload: bool | str, checkpoints: bool = True
) -> tuple[list[torch.Tensor], int, dict[str, int]]:
    """Gradients of the last step, peak of its memory, what was offloaded."""
    smp.init({"offload_activations": offload, "microbatches": 2})
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model = smp.DistributedModel(net)
    if checkpoints:
        smp.set_activation_checkpointing(net)
    step = train_step_of(model)
    x = torch.randn(2 * TOKENS, HIDDEN, device=DEVICE)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        memory = Memory()
        step(x)
        peak = memory.peak()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    stats = dict(smp.metrics.offload_stats())
    smp.shutdown()
    return grads, peak, stats


@pytest.mark.sample(keep=0)
def test_same_bits_and_less_memory() -> None:
    plain, plain_peak, _ = train(False)
    offloaded, peak, stats = train(True)
    assert len(plain) == 4 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    one = TOKENS * HIDDEN * 4
    assert stats["bytes_offloaded"] >= 3 * 2 * (LAYERS - 4) * one
    assert stats["loaded_late"] <= 2, "of the first step"
    assert stats["slots_in_use"] == 0 and stats["slots"] <= 2 * LAYERS
    if DEVICE == "cuda":
        assert plain_peak - peak > (LAYERS - 8) * one


@pytest.mark.sample(keep=0)
def test_all_that_autograd_saves_leaves_with_the_same_bits() -> None:
    plain, plain_peak, _ = train(False, checkpoints=False)
    offloaded, peak, stats = train("all", checkpoints=False)
    assert len(plain) == 4 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    kept = LAYERS * TOKENS * HIDDEN * 4 * 5  # of a microbatch: arguments of `up` and `down`
    assert stats["bytes_offloaded"] > kept and stats["slots_in_use"] == 0
    if DEVICE == "cuda":
        assert plain_peak - peak > kept - 10 * (64 << 20)
