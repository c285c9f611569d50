"""Optimizers that need more of a model than the element that they update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.model.torch_training.coupling import Coupling, coupling
from smp.optimizers import FusedAdam, FusedNovoGrad
from tests.dist.matrix_training import EightBits


class Own(torch.optim.Optimizer):
    """Updates by a function of all parameters that have a gradient.

    Counts its steps, and holds its parameters a second time, as LBFGS does.
    """

    def __init__(
        self, parameters: Iterable[Tensor], rule: Callable[[list[Any]], None], **defaults: Any
    ) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})
        self.rule, self.num_steps = rule, 0
        self.own = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        assert all(a is b for a, b in zip(self.own, self.param_groups[0]["params"], strict=True))
        for group in self.param_groups:
            self.rule([p for p in group["params"] if p.grad is not None])


def lars(parameters: list[Any]) -> None:
    for p in parameters:
        p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=0.01)


def by_norm_of_all(parameters: list[Any]) -> None:
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:
        p.sub_(p.grad / norm.clamp(min=1.0), alpha=0.1)


def signs(parameters: list[Any]) -> None:
    for p in parameters:
        p.sub_(p.grad.sign(), alpha=0.1)


def noise(parameters: list[Any]) -> None:
    for p in parameters:
        p.add_(torch.randn(p.shape), alpha=0.1)


def raises(parameters: list[Any]) -> None:
    raise RuntimeError("a closure is needed")


class Twice(Own):
    """Asks a closure for gradients, and once more at another place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        for _ in range(2):
            closure()
            self.rule([p for group in self.param_groups for p in group["params"]])


class Sharpness(Twice):
    """The second place is far along the gradient of all parameters, by its norm, as in SAM."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, by_norm_of_all)


def own(rule: Callable[[list[Any]], None], **defaults: Any) -> Callable[[Any], Own]:
    return lambda parameters: Own(parameters, rule, **defaults)


class Codes(Tensor):
    """A tensor of a class of its own, as libraries have for state in few bits."""


class WithCodes(Own):
    """Keeps state of large parameters in tensors of a class of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.own:
            zeros = torch.zeros_like(p)
            self.state[p]["momentum"] = zeros.as_subclass(Codes) if p.numel() >= 4096 else zeros


class WithNumber(Own):
    """Keeps a number beside the states of parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["updates"] = self.state.get("updates", 0) + 1  # type: ignore[assignment, index]


CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Coupling]] = {
    "AdamW": (torch.optim.AdamW, Coupling.NONE),
    "a class of AdamW": (type("Own", (torch.optim.AdamW,), {}), Coupling.NONE),
    "a class of SGD": (
        lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        Coupling.NONE,
    ),
    "a class of Adagrad": (type("Own", (torch.optim.Adagrad,), {}), Coupling.NONE),
    "FusedAdam": (FusedAdam, Coupling.NONE),
    "FusedNovoGrad": (FusedNovoGrad, Coupling.ELEMENTS),
    "Adafactor": (torch.optim.Adafactor, Coupling.ELEMENTS),
    "LARS": (own(lars), Coupling.ELEMENTS),
    "clips by itself": (own(by_norm_of_all), Coupling.PARAMETERS),
    "signs": (own(signs), Coupling.NONE),
    "8 bits": (EightBits, Coupling.ELEMENTS),
    "lr of a warm-up": (own(signs, lr=0.0), Coupling.NONE),
    "lr is a tensor": (own(lars, lr=torch.tensor(0.0)), Coupling.ELEMENTS),
    "draws numbers": (own(noise), Coupling.NONE),
    "cannot be tried": (own(raises), Coupling.NONE),
    "LBFGS": (torch.optim.LBFGS, Coupling.PARAMETERS),
    "sharpness": (lambda p: Sharpness(p), Coupling.PARAMETERS),
    "a closure": (lambda p: Twice(p, signs), Coupling.NONE),
}
if hasattr(torch.optim, "Muon"):
    CASES["Muon"] = (torch.optim.Muon, Coupling.ELEMENTS)


@pytest.mark.parametrize("name", CASES)
def test_trial(name: str) -> None:
    make, expected = CASES[name]
    values = [torch.ones(3, 4), torch.full((2, 2), 2.0)]
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = make(parameters)
    called: list[Any] = []
    states = copy.deepcopy(list(optimizer.state.values()))
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    torch.manual_seed(3)
    assert coupling(optimizer) is expected
    # Nothing is left of it.
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert str(list(optimizer.state.values())) == str(states)
    assert not called and getattr(optimizer, "num_steps", 0) == 0
    for parameter, value in zip(parameters, values, strict=True):
        assert torch.equal(parameter.detach(), value) and parameter.grad is None
    assert optimizer.param_groups[0]["params"][0] is parameters[0]


def test_state_in_tensors_of_another_class_is_refused() -> None:
    smp.init({})
    try:
        model = smp.DistributedModel(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"WithCodes keeps its state in .* class Codes.*Fused"):
            smp.DistributedOptimizer(WithCodes(model.parameters(), signs))
        smp.DistributedOptimizer(Own(model.parameters(), signs))
        smp.DistributedOptimizer(WithNumber(model.parameters(), signs))
    finally:
        smp.shutdown()


def test_parameters_without_memory_are_no_reason_not_to_try() -> None:
    parameter = nn.Parameter(torch.ones(3, 4, device="meta"))
    assert coupling(torch.optim.Adafactor([parameter])) is Coupling.ELEMENTS


def test_a_scheduler_that_has_wrapped_the_step_counts_nothing() -> None:
    optimizer = own(lars)([nn.Parameter(torch.ones(3))])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert coupling(optimizer) is Coupling.ELEMENTS
    assert scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.0
    assert optimizer.num_steps == 0


def test_each_group_counts() -> None:
    class Mixed(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                (lars if group["adapts"] else signs)(group["params"])

    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first], "adapts": False}, {"params": [second], "adapts": True}]
    assert coupling(Mixed(groups, lars)) is Coupling.ELEMENTS  # type: ignore[arg-type]
    assert coupling(Mixed(groups[:1], lars)) is Coupling.NONE  # type: ignore[arg-type]
