"""Models of the zoo, the same in every process: tiny, seeded, in one precision."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.catalogue import Entry
from tests.zoo.configs import tiny
from tests.zoo.inputs import NoRecipe, Recipe, find_recipe

LARGEST = 30_000_000  # parameters; a default that no rule has shrunk


@dataclass(frozen=True)
class Plan:
    """How an entry is built and fed.

    Attributes:
        entry: the class.
        recipe: its inputs.
        dtype: float64 where the model can.
        training: False where training draws random numbers that no configuration switches off.
        outputs: whether all optional outputs are on, and count in the loss.
    """

    entry: Entry
    recipe: Recipe
    dtype: torch.dtype = torch.float64
    training: bool = True
    outputs: bool = False

    @property
    def seed(self) -> int:
        return zlib.crc32(str(self.entry).encode())


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def build(entry: Entry, dtype: torch.dtype, training: bool = True, outputs: bool = False) -> Any:
    """The model, with the same values wherever it is built."""
    seed_everything(1)
    cls = entry.load()
    config = tiny(cls.config_class())
    if outputs:
        switch_outputs_on(config)
    model: nn.Module = cls(config)
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        raise NoRecipe("the model is not tiny")
    fill_(model)
    return model.to(dtype).train(training)


def switch_outputs_on(config: Any) -> None:
    """Every optional output that the configuration has a switch for."""
    from tests.zoo.configs import nested

    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if hasattr(config, name):
            try:
                setattr(config, name, True)
            except (ValueError, AttributeError):
                continue
    if hasattr(config, "_attn_implementation") and hasattr(config, "output_attentions"):
        config._attn_implementation = "eager"
    for inner in nested(config).values():
        switch_outputs_on(inner)


def fill_(model: nn.Module) -> None:
    """Adds noise to every parameter, and values to those that nothing initialises."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        with torch.no_grad():
            value = parameter.float()
            strange = ~torch.isfinite(value) | (value.abs() > 1e4)
            parameter.copy_(torch.where(strange, torch.zeros_like(value), value) + 0.05 * noise)


def make_plan(entry: Entry, outputs: bool = False) -> Plan:
    """Finds out how to feed a model: in float64, else in float32.

    Raises:
        NoRecipe: nothing gave a loss.
    """
    try:
        plan = _plan_in(entry, torch.float64, outputs)
    except NoRecipe as error:
        try:
            plan = _plan_in(entry, torch.float32, outputs)
        except NoRecipe:
            raise error from None
    return plan


def _plan_in(entry: Entry, dtype: torch.dtype, outputs: bool) -> Plan:
    model = build(entry, dtype)
    seed = zlib.crc32(str(entry).encode())
    recipe = find_recipe(model, dtype, seed)
    plan = Plan(entry, recipe, dtype, outputs=outputs)
    for training in (True, False):
        plan = replace(plan, training=training)
        if is_repeatable(plan):
            return plan
    raise NoRecipe("random numbers decide the loss, in eval mode too")


def is_repeatable(plan: Plan) -> bool:
    """Whether the loss is the same after other random numbers."""
    from tests.zoo.inputs import loss_of

    losses = []
    for seed in (1, 2):
        model = build(plan.entry, plan.dtype, plan.training, plan.outputs)
        inputs = plan.recipe.inputs(model, plan.dtype, plan.seed)
        seed_everything(seed)
        losses.append(loss_of(model(**inputs), plan.recipe.own_loss, plan.outputs).item())
    return losses[0] == losses[1]


def microbatches(plan: Plan, model: nn.Module, count: int, step: int, replica: int = 0) -> list[Any]:
    """The inputs of one step of one replica."""
    base = plan.seed + 1000 * step + 100_000 * replica
    return [plan.recipe.inputs(model, plan.dtype, base + number) for number in range(count)]


def loss_tensor(value: Tensor) -> float:
    return float(value.detach())
