"""Out of memory on one process: the error lists what was held."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import smp
from smp.observe.memory.failure import is_out_of_memory
from tests.harness import train_step_of
from tests.host_limit import host_memory

WIDTH, SAMPLES, NUM_LAYERS = 512, 8192, 8  # a result of a layer has 16 MiB


pytestmark = pytest.mark.usefixtures("ends")


def train(microbatches: int, limit_mb: int) -> float:
    live_mb = smp._C.host_memory_stats()["live_bytes"] >> 20
    smp.init({"microbatches": microbatches})
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step = train_step_of(model)
    batch = torch.ones(SAMPLES, WIDTH)
    with host_memory(live_mb + limit_mb):
        loss = train_step(batch).reduce_mean()
        optimizer.step()
    return float(loss)


def test_error_lists_what_was_held() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(1, 150)
    text = str(caught.value)
    assert re.search(r"out of memory in step '.*train_step': \d+\.\d MiB was asked for, ", text)
    held = dict(re.findall(r"^  ([a-z ]+)(?:\(tensors.*\))?: (\d+\.\d MiB|0 bytes)", text, re.M))
    assert held["parameters"] == "8.0 MiB", text  # 8 x 512 x 512 x 4, and the biases
    assert held["gradients"] == "0 bytes", "none yet"
    activations = re.search(r"activations in flight .*: (\d+)\.\d MiB", text)
    assert activations and 100 < int(activations[1]) < 160, text
    assert re.search(r"^  0: parameters 1\.0 MiB$", text, re.M), text
    assert "the partition expected nothing" in text
    assert text.splitlines()[-1].startswith("smp estimate computes what ranks hold")
    smp.shutdown()
    del caught
    whole = train(1, 4096)
    smp.shutdown()
    assert train(4, 150) == pytest.approx(whole), "smaller microbatches fit"


def test_error_without_a_limit_of_ours_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator of PyTorch itself, which the system gives nothing."""
    monkeypatch.setenv("SMP_HOST_POOL", "0")
    smp.init({"microbatches": 1})
    model = smp.DistributedModel(nn.Linear(4, 4))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        model.backward(loss)
        torch.empty(1 << 55)  # no machine has that
        return loss

    with pytest.raises(torch.OutOfMemoryError, match=r"was asked for") as caught:
        train_step(torch.ones(2, 4))
    assert "DefaultCPUAllocator" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_stay_what_they_are() -> None:
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    smp.init({"microbatches": 1})

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="^shapes differ$"):
        train_step(torch.ones(2, 4))
