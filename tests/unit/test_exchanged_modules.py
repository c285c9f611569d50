"""Models that put other modules into the place of their own, as BigBird does in its forward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import own_loss, train_step_of


class Wrapped(nn.Module):
    """Computes with a module that it receives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scale


class Exchanging(nn.Module):
    """Wraps its layer in the second step, or puts a new one there."""

    def __init__(self, is_new: bool) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(4, 4)
        self.is_new, self.is_due = is_new, False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_due and not isinstance(self.layer, Wrapped):
            self.layer = Wrapped(nn.Linear(4, 4) if self.is_new else self.layer)
        return self.layer(x).sum()


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[smp.DistributedModel]:
    smp.init({})
    plain = Exchanging(request.param)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    train_step(torch.ones(2, 4))
    plain.is_due = True
    train_step(torch.ones(2, 4))
    yield model
    smp.shutdown()


@pytest.mark.parametrize("model", [False], indirect=True)
def test_state_has_what_a_wrapper_holds(model: smp.DistributedModel) -> None:
    state = model.state_dict()
    assert list(state) == ["layer.scale", "layer.inner.weight", "layer.inner.bias"]
    assert {name for name, _ in model.local_named_modules()} == {"", "layer", "layer.inner"}


@pytest.mark.parametrize("model", [True], indirect=True)
def test_new_parameters_are_refused_by_name(model: smp.DistributedModel) -> None:
    with pytest.raises(RuntimeError, match=r"'layer\.inner\.weight' was added to the model after"):
        model.local_state_dict()
