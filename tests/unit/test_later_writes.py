"""Values that constructors write after own code count, delayed or not; one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import smp

BOTH = pytest.mark.parametrize("delayed", [False, True], ids=["at_once", "delayed"])


pytestmark = pytest.mark.usefixtures("running")


def values_of(make: Callable[[], nn.Module], delayed: bool, seed: int = 1) -> dict[str, Tensor]:
    """Returns the values of a model that was made in the context and wrapped."""
    torch.manual_seed(seed)
    with smp.delay_param_initialization(delayed):
        module = make()
    assert all(p.is_meta == delayed for p in module.parameters())
    model = smp.DistributedModel(module)
    prefix = "module.module."
    return {n.removeprefix(prefix): p.detach().clone() for n, p in model.named_parameters()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(64, 256)
        self.c_proj = nn.Linear(256, 64)


class NanoGPT(nn.Module):
    """Initialises as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=1e-3)
        nn.init.constant_(self.blocks[1].c_proj.bias, 5.0)  # type: ignore[arg-type, union-attr]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            nn.init.zeros_(module.bias)


@BOTH
def test_what_a_constructor_writes_after_own_code_counts(delayed: bool) -> None:
    values = values_of(NanoGPT, delayed)
    for idx in range(2):
        assert values[f"blocks.{idx}.c_proj.weight"].std() == pytest.approx(1e-3, rel=0.1)
        assert values[f"blocks.{idx}.c_fc.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(values["blocks.1.c_proj.bias"], torch.full((64,), 5.0))
    assert torch.equal(values["blocks.0.c_proj.bias"], torch.zeros(64))


def test_delayed_values_depend_on_seed_and_name_alone() -> None:
    one, again, other = (values_of(NanoGPT, True, seed) for seed in (1, 1, 2))
    assert all(torch.equal(value, again[name]) for name, value in one.items())
    weights = [f"blocks.{idx}.c_proj.weight" for idx in range(2)]
    assert not torch.equal(one[weights[0]], one[weights[1]])
    assert not torch.equal(one[weights[0]], other[weights[0]])


class Odd(nn.Module):
    """Writes without random numbers, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.views, self.steps, self.given = (nn.Linear(4, 3) for _ in range(3))
        self.alone = nn.Parameter(torch.empty(2, 2))  # has no own code
        self.first = nn.Linear(3, 3)
        self.copied = copy.deepcopy(self._filled())
        with torch.no_grad():
            self.views.weight[1:, ::2] = 2.0
            self.views.weight[0].copy_(self.views.weight[1])
            self.views.bias.data[torch.tensor([True, False, True])] = 7.0
            self.steps.weight.fill_(3.0).mul_(2.0).clamp_(max=5.5)
            self.steps.bias.zero_().add_(torch.arange(3.0), alpha=0.5)
        self.given.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.arange(3.0)})
        nn.init.eye_(self.alone)
        nn.init.ones_(self.first.weight)  # and then its own code once more
        self.first.reset_parameters()

    def _filled(self) -> nn.Linear:
        made = nn.Linear(2, 2)
        nn.init.constant_(made.weight, 4.0)
        return made


def test_writes_without_random_numbers_are_bitwise_those_of_no_delay() -> None:
    at_once, delayed = (values_of(Odd, delayed) for delayed in (False, True))
    assert at_once.keys() == delayed.keys()
    assert at_once["steps.weight"].max() == 5.5 and at_once["given.weight"].min() == 1.0
    assert torch.equal(delayed["copied.weight"], torch.full((2, 2), 4.0))
    for name, value in at_once.items():
        if name == "views.weight":
            assert torch.equal(delayed[name][1:, ::2], value[1:, ::2])
            assert torch.equal(delayed[name][0], delayed[name][1])
        elif name == "views.bias":
            assert delayed[name][::2].eq(7.0).all() and delayed[name][1].abs() <= 0.5
        elif name != "first.weight":
            assert torch.equal(delayed[name], value), name
    assert delayed["first.weight"].abs().max() <= 1 / math.sqrt(3), "own code came last"


@pytest.mark.parametrize("inside", [False, True])
def test_a_cast_keeps_what_was_written(inside: bool) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2))
        nn.init.constant_(module[0].weight, 4.0)  # type: ignore[arg-type]
        return module.bfloat16() if inside else module

    with smp.delay_param_initialization():
        module = make()
    smp.DistributedModel(module.bfloat16())
    assert torch.equal(module[0].weight, torch.full((2, 2), 4.0, dtype=torch.bfloat16))


def test_a_model_may_be_wrapped_inside() -> None:
    with smp.delay_param_initialization():
        module = nn.Sequential(nn.Linear(2, 2))
        nn.init.constant_(module[0].weight, 4.0)  # type: ignore[arg-type]
        smp.DistributedModel(module)
        assert torch.equal(module[0].weight, torch.full((2, 2), 4.0))


def copied(module: nn.Sequential) -> None:
    module[0].weight.data.copy_(module[1].weight)  # type: ignore[arg-type, operator, union-attr]


def computed(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(module[0].weight * 0.5)  # type: ignore[operator]


def orthogonal(module: nn.Sequential) -> None:
    nn.init.orthogonal_(module[0].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("write", "how"), [(copied, "copy_"), (computed, "mul"), (orthogonal, "copy_")]
)
def test_what_cannot_be_repeated_is_refused(
    write: Callable[[nn.Sequential], None], how: str
) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        write(module)
        return module

    with pytest.raises(ValueError, match=rf"'0.weight' was created .* set it by {how} .* reset_p"):
        values_of(make, True)


def test_parts_of_replaced_modules_have_it_too() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4))
        nn.init.constant_(module[0].weight, 4.0)  # type: ignore[arg-type]
        return module

    with smp.tensor_parallelism():
        values = values_of(make, True)
    (weight,) = (value for value in values.values() if value.dim() == 2)
    assert torch.equal(weight, torch.full((4, 4), 4.0))


class Scaled(nn.Module):
    """Parameters that are made with their values, as norms and positions often are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)
        self.steps = nn.Parameter(torch.arange(6.0).view(2, 3) / 2)
        self.position = nn.Parameter(torch.randn(1, 3, 4) * 0.02)
        self.table = nn.Embedding.from_pretrained(torch.eye(3))
        self.own = nn.Linear(4, 4)
        with torch.no_grad():
            self.scale[1] = 3.0


def test_values_that_parameters_are_made_of_count() -> None:
    at_once, delayed = (values_of(Scaled, delayed) for delayed in (False, True))
    for name in ("scale", "flag", "steps", "position", "table.weight"):
        assert torch.equal(at_once[name], delayed[name]), name
    assert delayed["scale"].tolist() == [1.0, 3.0, 1.0, 1.0]
    assert torch.equal(at_once["own.weight"], delayed["own.weight"])


class Drawn(nn.Module):
    """Made with values, and then initialised by its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 1.0, 2.0)


def test_own_code_counts_more_than_what_a_parameter_was_made_of() -> None:
    at_once, delayed = (values_of(Drawn, delayed) for delayed in (False, True))
    assert torch.equal(at_once["weight"], delayed["weight"])
    assert delayed["weight"].min() >= 1.0


@pytest.mark.parametrize(
    "memory",
    [
        lambda: torch.empty(3),
        lambda: torch.Tensor(3),
        lambda: torch.ones(3).new_empty(3),
        lambda: torch.empty_like(torch.ones(3)),
        lambda: torch.empty(5)[:3],
    ],
)
def test_memory_that_nobody_has_written_to_is_no_value(memory: Callable[[], Tensor]) -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(memory())
        return module

    with pytest.raises(ValueError, match="nothing initialises 'weight'"):
        values_of(make, True)


def test_memory_that_was_let_go_of_is_not_mistaken_for_other() -> None:
    """Addresses are used again."""

    def make() -> nn.Module:
        for _ in range(5000):
            torch.empty(3)
        return nn.ParameterList(torch.full((3,), float(idx)) for idx in range(50))

    for name, value in values_of(make, True).items():
        assert torch.equal(value, torch.full((3,), float(name))), name
