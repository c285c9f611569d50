"""Models of the zoo, the same in every process: tiny, seeded, in one precision."""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.zoo.catalogue import Entry
from tests.zoo.configs import VARIANTS, Variant, tiny
from tests.zoo.recipes import PatternRecipe, Recipe, check_recipe, find_recipe
from tests.zoo.shrinking import without_values
from tests.zoo.source import NoRecipe

PATIENCE_S = 10.0  # for one model's search
# Sources whose models have no configuration; their modules have `candidates` and `build`.
_MAKERS = {
    "torchvision": "tests.zoo.vision",
    "timm": "tests.zoo.vision",
    "diffusers": "tests.zoo.diffusers_models",
}
NOISE = 0.05  # in parameters
LARGEST = 20_000_000  # parameters; a default that no rule has shrunk


@dataclass(frozen=True)
class Plan:
    """A way to build and feed an entry.

    Attributes:
        entry: the class.
        recipe: recipe of its inputs.
        dtype: float64 where the model can.
        training: False where training draws random numbers that no configuration switches off.
        variant: rules by which its configuration was shrunk.
    """

    entry: Entry
    recipe: Any  # of `inputs`, or of the module in `_MAKERS`
    dtype: torch.dtype = torch.float64
    training: bool = True
    variant: Variant = VARIANTS[0]

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


def build(plan: Plan, outputs: bool = False) -> Any:
    """The model, with the same values wherever it is built."""
    seed_everything(1)
    if plan.entry.source == "patterns":
        return _ready(plan, plan.entry.load()())
    if plan.entry.source in _MAKERS:
        with nothing_uninitialized():
            model = _maker(plan.entry).build(plan.entry, plan.recipe.choice)
        return _ready(plan, model, by_width=True)
    cls = plan.entry.load()
    config = tiny(cls.config_class(), plan.variant)
    if outputs:
        switch_outputs_on(config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise NoRecipe(f"the model is not tiny: {size} parameters")
    seed_everything(1)
    return _ready(plan, cls(config))


def skeleton(plan: Plan) -> Any:
    """A model that is only asked what inputs it takes."""
    if plan.entry.source not in _MAKERS:
        return build(plan)
    return without_values(lambda: _maker(plan.entry).build(plan.entry, plan.recipe.choice))


@contextlib.contextmanager
def nothing_uninitialized() -> Iterator[None]:
    """Makes tensors that were not filled hold NaN, which `fill_` finds, and not what lay there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _ready(plan: Plan, model: nn.Module, by_width: bool = False) -> nn.Module:
    fill_(model, by_width)
    return model.to(plan.dtype).train(plan.training)


def _maker(entry: Entry) -> Any:
    return importlib.import_module(_MAKERS[entry.source])


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


def fill_(model: nn.Module, by_width: bool = False) -> None:
    """Adds noise to every parameter, and values to those that nothing initialises.

    Args:
        model: gets it.
        by_width: whether wide layers get less, so that deep models without norms stay in range.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        with torch.no_grad():
            value = parameter.float()
            strange = ~torch.isfinite(value) | (value.abs() > 1e4)
            # A last ReLU has to be open: that of a single number is.
            up = 0.5 if name.endswith("bias") and parameter.numel() == 1 else 0.0
            value = torch.where(strange, torch.zeros_like(value), value)
            noise *= min(NOISE, 0.5 / _inputs_of(value) ** 0.5) if by_width else NOISE
            parameter.copy_(value + up + noise)


def _inputs_of(value: torch.Tensor) -> int:
    return value[0].numel() if value.dim() > 1 else 1


def make_plan(entry: Entry) -> Plan:
    """Finds out how to shrink and feed a model: in float64, else in float32.

    Raises:
        NoRecipe: nothing gave a loss.
    """
    if entry.source == "patterns":
        return Plan(entry, PatternRecipe())
    if entry.source in _MAKERS:
        return _search(entry)
    reasons: list[str] = []
    without_own: Plan | None = None
    start = time.process_time()
    seen: set[str] = set()
    for variant in VARIANTS:
        if time.process_time() - start > PATIENCE_S:
            break
        if _is_known(entry, variant, seen):
            continue
        for dtype in (torch.float64, torch.float32):
            try:
                plan = _plan_in(Plan(entry, Recipe(0, 0, True), dtype, variant=variant))
                if plan.recipe.own_loss:
                    return plan
                # Losses of detectors have tables in float32.
                without_own = without_own or plan
            except NoRecipe as error:
                reasons.append(str(error))
            except ImportError:
                raise
            except Exception as error:  # configurations and models raise what they like
                reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
                break
        if without_own is not None:
            return without_own
    raise NoRecipe(" | ".join(dict.fromkeys(reasons)))


def _is_known(entry: Entry, variant: Variant, seen: set[str]) -> bool:
    """Returns whether another variant has made the same configuration."""
    try:
        text = repr(tiny(entry.load().config_class(), variant).to_dict())
    except Exception:  # is tried, so that the reason is kept
        return False
    known = text in seen
    seen.add(text)
    return known


def _search(entry: Entry) -> Plan:
    """The first of what the module of its source proposes that works."""
    reasons: list[str] = []
    built: dict[str, nn.Module] = {}  # the last one, by choice and dtype
    for recipe in _maker(entry).candidates(entry):
        for dtype in (torch.float64, torch.float32):
            plan = Plan(entry, recipe, dtype)
            try:
                key = f"{recipe.choice} {dtype}"
                if key not in built:
                    built = {key: build(plan)}
                check_recipe(*built.values(), dtype, plan.seed, recipe)
                return _repeatable(plan)
            except Exception as error:  # models raise what they like
                reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
                if not re.search("dtype|float|double", str(error), re.I):
                    break
    raise NoRecipe(" | ".join(dict.fromkeys(reasons)) or "no arguments make a model")


def _plan_in(plan: Plan) -> Plan:
    return _repeatable(replace(plan, recipe=find_recipe(build(plan), plan.dtype, plan.seed)))


def _repeatable(plan: Plan) -> Plan:
    for training in (True, False):
        plan = replace(plan, training=training)
        if is_repeatable(plan):
            return plan
    raise NoRecipe("random numbers decide the loss, in eval mode too")


def is_repeatable(plan: Plan) -> bool:
    """Returns whether the loss is the same after other random numbers."""
    losses = []
    for seed in (1, 2):
        model = build(plan)
        inputs = plan.recipe.inputs(model, plan.dtype, plan.seed)
        seed_everything(seed)
        losses.append(plan.recipe.loss(model(**inputs), everything=False).item())
    return losses[0] == losses[1]
