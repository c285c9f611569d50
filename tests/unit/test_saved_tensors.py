"""Tensors that autograd saves wait in host memory, with the bits and errors of plain training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.world import runtime
from tests.harness import train_step_of
from tests.unit.test_activation_checkpointing import Net, assert_same


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    smp.shutdown()


class Doubled(torch.autograd.Function):
    """A function of the user that saves its argument, and a result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * 2 * x + 0 * y


class Mixer(nn.Module):
    """Saves views of one storage, results, masks, parameters, and buffers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.frozen = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.register_buffer("scale", torch.rand(4, 5, 16))
        self.inner = Net()
        self.inner.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.mT, -1) @ v
        mixed = torch.relu_(self.out(mixed) * self.scale @ self.frozen.t())
        return x + self.inner(Doubled.apply(mixed))


def train_mixers(offload: bool | str, checkpoints: bool = False) -> list[Tensor]:
    """Returns losses and gradients of some steps."""
    torch.manual_seed(0)
    smp.init({"offload_activations": offload, "microbatches": 2})
    if offload:
        runtime.current()._activation_store = smp._C.ActivationStore(
            "cpu", horizon=1, min_bytes=64, group_bytes=8192
        )
    net = nn.Sequential(Mixer(), Mixer(), Mixer())
    model = smp.DistributedModel(net)
    if checkpoints:
        smp.set_activation_checkpointing(net[1].inner)
    train = train_step_of(model, lambda model, x: model(x).square().mean())
    found = [train(torch.randn(8, 5, 16)).stack() for _ in range(3)]
    return found + [p.grad for p in net.parameters() if p.grad is not None]


def test_what_autograd_saves_goes_to_the_host_and_changes_no_bit() -> None:
    expected = train_mixers(False)
    smp.shutdown()
    for checkpoints in (False, True):
        assert_same(train_mixers("all", checkpoints), expected)
        stats = smp.metrics.offload_stats()
        assert stats["offloaded"] > 3 * 2 * 20 and stats["loaded_ahead"] > stats["loaded_late"]
        assert stats["stayed"] > 0 and stats["checkpoints"] == 6 * checkpoints
        assert stats["slots_in_use"] == 0
        smp.shutdown()


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_a_saved_tensor_that_changes_is_an_error_as_without_offloading(min_bytes: int) -> None:
    class Changes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(super().forward(x))
            return y.mul_(2)

    smp.init({"offload_activations": "all"})
    runtime.current()._activation_store = smp._C.ActivationStore("cpu", 1, min_bytes)
    model = smp.DistributedModel(Changes(8, 8))
    with pytest.raises(RuntimeError, match=r"shape \[4, 8\] .* changed in place .*version 1"):
        model(torch.randn(4, 8)).sum().backward()


def test_graphs_with_saved_tensors_on_the_host_end_with_their_results() -> None:
    smp.init({"offload_activations": "all"})
    store = runtime.current()._activation_store = smp._C.ActivationStore("cpu", 1, min_bytes=0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    model = smp.DistributedModel(net)
    y = model(torch.randn(4, 8))
    assert store.stats()["slots_in_use"] > 0
    y.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    y.sum().backward()
    assert_same([p.grad / 2 for p in net.parameters() if p.grad is not None], first)
    y = model(torch.randn(4, 8))
    del y  # without a backward, and no cycle keeps it
    assert store.stats()["slots_in_use"] == 0
