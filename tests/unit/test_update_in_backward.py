"""Updates during the backward in one process, and refusals of calls that need all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.harness import Layers, samples_of, train_step_of

Start = Callable[..., None]


class Coupled(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (smp.optimizers.FusedLAMB, "FusedLAMB reads norms of all gradients"),
        (smp.optimizers.FusedNovoGrad, "FusedNovoGrad reads norms of all gradients"),
        (lambda params: Coupled(params, lr=0.1), "Coupled reads other parameters"),
    ],
)
def test_optimizers_that_read_more_than_a_gradient_are_refused(
    start: Start, make: Any, words: str
) -> None:
    start(update_in_backward=True)
    model = smp.DistributedModel(Layers())
    with pytest.raises(ValueError, match=words):
        smp.DistributedOptimizer(make(model.parameters()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backward_passes_per_step": 2}, "backward_passes_per_step=2: gradients have to exist"),
        ({"overlapping_allreduce": False}, "overlapping_allreduce=False: gradients have to exist"),
    ],
)
def test_arguments_that_keep_gradients_are_refused(
    start: Start, arguments: dict[str, Any], words: str
) -> None:
    start(update_in_backward=True)
    with pytest.raises(ValueError, match=words):
        smp.DistributedModel(Layers(), **arguments)


def trained() -> tuple[Any, Any]:
    """Makes a step, and returns the model and the optimizer."""
    model = smp.DistributedModel(Layers().double())
    optimizer = smp.DistributedOptimizer(smp.optimizers.FusedAdam(model.parameters()))
    train_step_of(model)(samples_of(0))
    return model, optimizer


def clip_by_value(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def clip_masters(model: Any, optimizer: Any) -> None:
    optimizer.clip_master_grads(1.0)


def read_norm(model: Any, optimizer: Any) -> None:
    smp.grad_norm(model.parameters())


def unscale(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("call", [clip_by_value, clip_masters, read_norm, unscale])
def test_calls_that_read_all_gradients_are_refused(start: Start, call: Any) -> None:
    start(update_in_backward=True)
    model, optimizer = trained()
    with pytest.raises(ValueError, match="update_in_backward: .* was applied and dropped"):
        call(model, optimizer)


def test_a_hook_is_refused(start: Start) -> None:
    start(update_in_backward=True, ddp=True)
    model = smp.DistributedModel(Layers())
    with pytest.raises(ValueError, match="update_in_backward=True: register_comm_hook"):
        model.register_comm_hook(None, lambda state, bucket: None)


def test_backward_outside_of_a_step_updates_as_well(start: Start) -> None:
    start(update_in_backward=True)
    net = Layers().double()
    before = [p.detach().clone() for p in net.parameters()]
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(samples_of(0)).square().mean().backward()
    assert all(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="a second backward began without"):
        model(samples_of(0)).square().mean().backward()
    optimizer.step()


def test_a_wrapper_of_the_same_optimizer_takes_its_place(start: Start) -> None:
    """Two wrappers would update twice."""
    found: list[list[Tensor]] = []
    for again in (False, True):
        start(update_in_backward=True)
        net = Layers().double()
        model = smp.DistributedModel(net)
        first = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = smp.DistributedOptimizer(first) if again else first
        train_step_of(model)(samples_of(0))
        optimizer.step()
        found.append([p.detach().clone() for p in net.parameters()])
        smp.shutdown()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
