"""Offloading on a device: the same bits, less memory, copies beside the compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import smp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LAYERS, HIDDEN, TOKENS = 12, 1024, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    smp.shutdown()


def train(offload: bool) -> tuple[list[torch.Tensor], int, dict[str, int]]:
    """Gradients of the last step, peak of its memory, what was offloaded."""
    smp.init({"offload_activations": offload, "microbatches": 2})
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(net)

    @smp.step
    def step(x: torch.Tensor) -> None:
        model.backward(model(x).square().mean())

    x = torch.randn(2 * TOKENS, HIDDEN, device="cuda")
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(x)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    stats = dict(smp.metrics.offload_stats())
    smp.shutdown()
    return grads, peak, stats


def test_same_bits_and_less_memory() -> None:
    plain, plain_peak, _ = train(False)
    offloaded, peak, stats = train(True)
    assert len(plain) == 4 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    one = TOKENS * HIDDEN * 4
    assert stats["bytes_offloaded"] >= 3 * 2 * (LAYERS - 4) * one
    assert stats["loaded_late"] <= 2, "of the first step"
    assert stats["slots_in_use"] == 0 and stats["slots"] <= 2 * LAYERS
    assert plain_peak - peak > (LAYERS - 8) * one
