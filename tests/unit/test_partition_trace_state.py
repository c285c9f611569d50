"""A trace undoes what a forward does to parameters and buffers, and tells of lasting casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from smp.partition.trace import trace
from smp.partition.trace_state import KeptValues

CPU = torch.device("cpu")


class Router(nn.Module):
    """Casts a layer of its own in each forward; its bias is a neighbour's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 3)
        self.other = nn.Linear(4, 3)
        self.other.bias = self.classifier.bias
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float64)
        return self.classifier(x.double()) + self.other.bias


class Writer(nn.Module):
    """Averages weights in its forward, in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.table = nn.Parameter(torch.randn(4))
        self.register_buffer("center", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
            self.slow.bias.data = self.fast.bias.data * 0.5
            self.table.data[1] = 7.0
        self.center = self.center.half().float() * 3
        self.frozen.requires_grad_(False)
        return self.slow(x) + self.fast(x) + self.frozen(x) + self.table + self.center


@pytest.mark.parametrize("fake", [True, False])
def test_a_layer_that_a_forward_casts_is_as_before_and_the_cast_is_told(fake: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Router())
    router = model[1]
    before = [(p, p.data_ptr(), p.dtype, p.detach().clone()) for p in model.parameters()]
    result = trace(model, (torch.randn(2, 4),), {}, device=CPU, fake=fake)
    for (parameter, address, dtype, value), now in zip(before, model.parameters(), strict=True):
        assert now is parameter and now.data_ptr() == address and now.dtype == dtype
        assert torch.equal(now, value)
    assert "_apply" not in vars(router)
    named = {(result.modules[idx], name): dtype for idx, name, dtype in result.casts}
    assert named == {
        (router.classifier, "weight"): torch.float64,
        (router.classifier, "bias"): torch.float64,
        (router.other, "bias"): torch.float64,
    }


def test_values_that_a_real_forward_writes_are_as_before() -> None:
    model = Writer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memory = {name: value.data_ptr() for name, value in model.state_dict().items()}
    trace(model, (torch.randn(2, 4),), {}, device=CPU, fake=False, measure_times=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert value.data_ptr() == memory[name], name
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_parameters_of_one_memory_are_kept_together() -> None:
    memory = torch.arange(8.0)
    net = nn.ParameterList([nn.Parameter(part) for part in memory.split(4)])
    kept = KeptValues([net])
    with torch.no_grad(), kept:
        net[0].mul_(2.0)
    assert not torch.equal(memory, torch.arange(8.0))
    before = kept.values_before()
    assert [before[parameter].tolist() for parameter in net] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    kept.restore()
    assert torch.equal(memory, torch.arange(8.0))
