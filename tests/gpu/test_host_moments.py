"""Moments in host memory: the bits of moments on the device, and the memory that they free."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp.modules import state_bytes
from smp.optimizers import FusedAdam
from tests.gpu.device import DEVICE, needs_cuda, synchronize

NUMEL = 3 * state_bytes.LEAST_AWAY_ELEMENTS + 11


def optimizers(state_dtype: str, numel: int) -> list[tuple[nn.Parameter, FusedAdam]]:
    """Returns equal parameters with moments on the device, and on the host."""
    result = []
    for is_on_host in (False, True):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
        param = nn.Parameter(values.to(DEVICE))
        optimizer = FusedAdam([param], lr=0.01, state_dtype=state_dtype)
        optimizer.set_moments_on_host(is_on_host)
        result.append((param, optimizer))
    return result


@pytest.mark.parametrize("state_dtype", list(state_bytes.STATE_DTYPES))
def test_updates_have_the_bits_of_moments_on_the_device(
    state_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_bytes, "PIECE_ELEMENTS", 1 << 14)
    both = optimizers(state_dtype, NUMEL)
    for step in range(4):
        grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 + step)).to(DEVICE)
        for param, optimizer in both:
            param.grad = grad.clone()
            optimizer.step()
    (first, plain), (second, moved) = both
    assert torch.equal(first, second)
    here, there = plain.state[first], moved.state[second]
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert torch.equal(value.cpu(), there[name].cpu()), name
    assert there["exp_avg"].device.type == "cpu"
    assert there["exp_avg"].is_pinned() == (DEVICE != "cpu")


@needs_cuda
def test_moments_take_no_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_bytes, "PIECE_ELEMENTS", 1 << 20)
    numel = 1 << 26
    [_, (param, optimizer)] = optimizers("fp32", numel)
    param.grad = torch.ones_like(param)
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    slots = state_bytes.SLOTS * 8 << 20
    assert torch.cuda.max_memory_allocated() - before < 1.1 * slots + (1 << 20)
