"""Step functions in a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp


@pytest.fixture
def model() -> Iterator[smp.DistributedModel]:
    smp.init({"microbatches": 2})
    yield smp.DistributedModel(nn.Linear(3, 1))
    smp.shutdown()


class Broken:
    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        raise ValueError("cannot be cut")


def test_a_step_that_failed_does_not_spoil_the_next(model: smp.DistributedModel) -> None:
    @smp.step
    def train_step(x: Tensor, extra: Any) -> Tensor:
        loss: Tensor = model(x).mean()
        model.backward(loss)
        if extra == "raise":
            raise RuntimeError("in the body")
        return loss

    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="cannot be cut"):
        train_step(x, Broken())
    with pytest.raises(RuntimeError, match="in the body"):
        train_step(x, "raise")
    train_step(x, None)
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    plain(x).mean().backward()
    assert torch.allclose(model.get_module().weight.grad, plain.weight.grad)
