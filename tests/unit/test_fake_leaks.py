"""Values that a model's code keeps of a trace with shapes only are removed again."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smp.partition.trace import trace

_by_shape: dict[int, Tensor] = {}


@functools.lru_cache(maxsize=4)
def _positions(length: int) -> Tensor:
    return torch.arange(length) / length


def _cached_within(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """A decorator with a cache that only the function it makes knows, as diffusers has one."""
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def call(length: int) -> Tensor:
        return cached(length)

    return call


@_cached_within
def _steps(length: int) -> Tensor:
    return torch.arange(1, length + 1) / length


class _Steps:
    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of(length: int) -> Tensor:
        return torch.ones(length)


@pytest.mark.parametrize("frozen", [False, True])
def test_caches_do_not_keep_tensors_without_data(frozen: bool) -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in _by_shape:
                _by_shape[len(x)] = torch.ones(len(x), 1)
            known = _positions(4) * _by_shape[len(x)]
            return self.linear(x) * known * _steps(4) * _Steps.of(4)

    model = Caching()
    _positions.cache_clear()
    _by_shape.clear()
    if frozen:  # scripts do that before they fork; the collector does not name objects then
        gc.freeze()
    try:
        trace(model, (torch.randn(3, 4),), {}, device=torch.device("cpu"))
    finally:
        if frozen:
            gc.unfreeze()
    assert not _by_shape and _positions.cache_info().currsize == 0
    result = model(torch.ones(3, 4))
    assert type(result) is Tensor and float(result.detach().abs().sum()) > 0
    assert type(_positions(4)) is Tensor and _positions.cache_info().currsize == 1
    assert type(_steps(4)) is Tensor and type(_Steps.of(4)) is Tensor
