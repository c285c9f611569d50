"""Parameters that are gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from smp.storage.units import UnitPlan, find_blocks, plan_units


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.attention(x))
        return y


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.encoder.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.drop(self.encoder(x)))
        return y


def everything(parameter: Tensor) -> bool:
    return True


def named(plan: UnitPlan, root: nn.Module) -> dict[str, list[str]]:
    names = {parameter: name for name, parameter in root.named_parameters()}
    return {unit.name: [names[p] for p in unit.parameters] for unit in plan.units}


def test_blocks_are_units_and_the_rest_goes_by_module() -> None:
    model = Model()
    plan = plan_units(model, everything)
    units = named(plan, model)
    assert list(units) == ["encoder", "encoder.embed"] + [f"encoder.layers.{i}" for i in range(3)]
    assert units["encoder"] == ["encoder.scale"]
    assert len(units["encoder.layers.1"]) == 6
    assert sum(map(len, units.values())) == len(list(model.parameters()))


def test_shared_parameters_are_a_unit_that_all_their_users_need() -> None:
    model = Model()
    plan = plan_units(model, everything)
    (tied,) = (i for i, unit in enumerate(plan.units) if unit.name == "encoder.embed")
    assert plan.needs[model.encoder.embed] == plan.needs[model.head] == (tied,)


def test_a_shared_parameter_of_two_blocks_is_apart_from_their_own() -> None:
    blocks = nn.Sequential(Block(), Block(), Block())
    blocks[2].attention.weight = blocks[0].attention.weight
    plan = plan_units(blocks, everything)
    tied = [i for i, unit in enumerate(plan.units) if len(unit.parameters) == 1]
    assert len(tied) == 1 and len(plan.units) == 4
    assert set(plan.needs[blocks[0]]) & set(plan.needs[blocks[2]]) == set(tied)
    assert len(plan.needs[blocks[1]]) == 1


def test_modules_that_may_read_are_there_without_units_and_others_are_not() -> None:
    model = Model()
    plan = plan_units(model, everything)
    assert plan.needs[model] == ()
    assert model.drop not in plan.needs and model.encoder.layers not in plan.needs
    assert model.encoder.layers[0].attention not in plan.needs, "its block gathers it"


def test_only_sharded_parameters_count() -> None:
    model = Model()
    assert plan_units(model, lambda p: False).units == ()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "1", "2"]),
        (nn.Sequential(Encoder(), nn.Linear(4, 2)), [f"0.layers.{i}" for i in range(3)] + ["1"]),
        (nn.Sequential(nn.Sequential(Block(), Block()), Block()), ["0.0", "0.1", "1"]),
    ],
)
def test_blocks_are_elements_of_lists_that_are_not_most_of_the_model(
    model: nn.Module, expected: list[str]
) -> None:
    assert [name for _, name in find_blocks(model)] == expected


def test_parametrizations_are_no_list_of_blocks() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(normed, nn.Linear(4, 4), nn.Linear(4, 4))
    assert [name for _, name in find_blocks(model)] == ["0", "1", "2"]


def test_a_block_whose_forward_another_rank_runs_is_none() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
    plan = plan_units(model, lambda p: True, lambda module: module is not model[1])
    parts = [name for name, part in model[1].named_modules() if part._parameters]
    assert [u.name for u in plan.units] == ["0", *(f"1.{name}" for name in parts), "2"]
    assert plan.needs[model[0]] and not plan.needs.get(model[1])
    for name in parts:
        assert plan.needs[model[1].get_submodule(name)], name
