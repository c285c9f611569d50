"""Finds inputs that give a loss, by trying.

`find_recipe` tries the kinds of main inputs with the kinds of targets, and takes the first with
which the model in one process gives a loss and gradients. A model that gives no loss of its own
gets one from its outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.inputs import main_inputs
from tests.zoo.source import Inputs, NoRecipe, Source
from tests.zoo.targets import targets

# ---- the loss --------------------------------------------------------------


def loss_of(output: Any, own: bool, everything: bool) -> Tensor:
    """The loss to train with.

    Args:
        output: output of the model.
        own: whether the model gives a loss.
        everything: whether all other outputs count as well.
    """
    terms: list[Tensor] = []
    if own:
        loss = _own_loss(output)
        if loss is None:
            raise NoRecipe("no loss among the outputs")
        terms.append(loss)
    if everything or not own:
        tensors = [t for t in tensors_in(output) if t.dim() > 0]
        terms += [0.1 * _mean_square(tensor) for tensor in tensors]
    if not terms:
        raise NoRecipe("no output has a gradient")
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


def _mean_square(tensor: Tensor) -> Tensor:
    """Averages the squares of the finite part: masks of attention are outputs of some models."""
    kept = torch.where(tensor.detach().abs() < 1e3, tensor, torch.zeros_like(tensor))
    return (kept * kept).mean()


def _own_loss(output: Any) -> Tensor | None:
    loss = output if isinstance(output, Tensor) else None
    if loss is None and hasattr(output, "keys"):
        loss = output["loss"] if "loss" in output else None
        if loss is None:
            loss = next((output[name] for name in output if name.endswith("loss")), None)
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of real numbers in an output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    if hasattr(value, "keys") and hasattr(value, "values"):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


# ---- recipes ---------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A choice among the kinds of inputs that a model takes.

    Attributes:
        main, target: numbers in `main_inputs` and `_targets`.
        own_loss: whether the model gives a loss.
    """

    main: int
    target: int
    own_loss: bool

    def inputs(self, model: nn.Module, dtype: torch.dtype, seed: int) -> Inputs:
        """Makes one microbatch."""
        source = Source(model, dtype, seed)
        main = _nth(main_inputs(source), self.main)
        return main | _nth(targets(source, main), self.target)

    def loss(self, output: Any, everything: bool) -> Tensor:
        return loss_of(output, self.own_loss, everything)


@dataclass(frozen=True)
class PatternRecipe:
    """A recipe of the inputs that all patterns take."""

    own_loss: bool = True

    def inputs(self, model: nn.Module, dtype: torch.dtype, seed: int) -> Inputs:
        from tests.zoo.patterns import inputs_of

        return inputs_of(torch.Generator().manual_seed(seed), dtype)

    def loss(self, output: Any, everything: bool) -> Tensor:
        return loss_of(output, self.own_loss, everything)


def _nth(values: Iterator[Inputs], number: int) -> Inputs:
    return next(itertools.islice(values, number, None))


def find_recipe(model: nn.Module, dtype: torch.dtype, seed: int) -> Recipe:
    """The first kinds of inputs with which the model gives a loss and gradients."""
    errors: list[str] = []
    fallback: Recipe | None = None
    for main, inputs in enumerate(main_inputs(Source(model, dtype, seed))):
        kinds = list(targets(Source(model, dtype, seed), inputs))
        # Inputs that fail without targets hardly run with others than the likeliest ones.
        runs = _runs(model, dtype, seed, Recipe(main, len(kinds) - 1, False))
        for target in range(len(kinds) if runs else 1):
            for own in (True, False):
                if fallback is not None and not own:
                    continue
                recipe = Recipe(main, target, own)
                try:
                    check_recipe(model, dtype, seed, recipe)
                except Exception as error:
                    errors.append(f"{main}.{target}: {type(error).__name__}: {str(error)[:150]}")
                    continue
                if own:
                    return recipe
                fallback = recipe
        if fallback is not None:
            return fallback
    raise NoRecipe(
        "; ".join(dict.fromkeys([*errors[:2], *errors[-2:]])) or "no kind of inputs fits"
    )


def _runs(model: nn.Module, dtype: torch.dtype, seed: int, recipe: Recipe) -> bool:
    try:
        with torch.no_grad():
            model(**recipe.inputs(model, dtype, seed))
    except Exception:  # models raise what they like
        return False
    return True


def check_recipe(model: nn.Module, dtype: torch.dtype, seed: int, recipe: Any) -> None:
    """Raises unless the model in one process gives a loss and gradients.

    Raises:
        NoRecipe: it runs, but cannot be trained.
    """
    inputs = recipe.inputs(model, dtype, seed)
    loss = recipe.loss(model(**inputs), everything=False)
    if not bool(torch.isfinite(loss)):
        raise NoRecipe("the loss is not finite")
    try:
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not grads or not any(bool(g.abs().max() > 0) for g in grads if g.numel()):
            raise NoRecipe("no gradient")
        if not all(bool(torch.isfinite(g).all()) for g in grads):
            raise NoRecipe("a gradient is not finite")
    finally:
        model.zero_grad(set_to_none=True)
