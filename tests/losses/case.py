"""A loss as a script has it, and how it is expected to come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 8
LENGTH = 6  # of sequences
CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 7.0], dtype=torch.float64)

EQUAL, WARNED, REFUSED = "equal", "warned", "refused"
EQUAL_WARNED = "equal, warned"
DIFFERENT, ERROR = "DIFFERENT", "error"

Batch = dict[str, Any]
Expected = str | Mapping[str, str]
"""An outcome in all layouts, or one by layout with "" for the others."""


@dataclass(frozen=True)
class Case:
    """A loss.

    Attributes:
        name: name in the table.
        loss: computes it from a model and the arguments of the step.
        model: makes the model; parameters become float64.
        batch: makes the whole batch of all replicas.
        default: outcome of the step function without a weight.
        weight: expression for what the loss is a mean over, of the arguments of a microbatch; None:
            not needed.
        weighted: outcome with the weight.
        axes: ``input_split_axes``.
        whole: ``non_split_inputs``.
        tolerance: relative to the largest gradient.
    """

    name: str
    loss: Callable[..., Tensor]
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    default: Expected = EQUAL
    weight: str | None = None
    weighted: Expected = EQUAL
    axes: Mapping[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    tolerance: float = 1e-9

    def weigh(self, **batch: Any) -> Any:
        """Returns the weight of a microbatch."""
        assert self.weight is not None
        return eval(self.weight, {"CLASS_WEIGHTS": CLASS_WEIGHTS, "LENGTH": LENGTH} | batch)

    def expected(self, layout: str, has_weight: bool) -> str:
        found = self.weighted if has_weight else self.default
        return found if isinstance(found, str) else found.get(layout, found[""])


CASES: dict[str, Case] = {}


def case(name: str, **fields: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers the decorated loss; ``model`` and ``batch`` have defaults."""

    def decorate(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        assert name not in CASES
        CASES[name] = Case(name, loss, **{"model": mlp(), "batch": classes(), **fields})
        return loss

    return decorate


def mlp(inputs: int = 6, outputs: int = 5, hidden: int = 7) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randint(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def classes(inputs: int = 6, outputs: int = 5) -> Callable[[], Batch]:
    return lambda: {"x": randn(SAMPLES, inputs), "y": randint(outputs, SAMPLES)}


def values(inputs: int = 6, outputs: int = 5) -> Callable[[], Batch]:
    return lambda: {"x": randn(SAMPLES, inputs), "y": randn(SAMPLES, outputs, seed=3)}


def pairs(inputs: int = 6) -> Callable[[], Batch]:
    return lambda: {"x": randn(SAMPLES, inputs), "z": randn(SAMPLES, inputs, seed=4)}


def padding(length: int, seed: int = 5) -> Tensor:
    """Returns which positions of each sequence are there; lengths differ much."""
    lengths = torch.tensor([length, 1, 3, 2, length - 1, length, 2, 4])
    return torch.arange(length) < lengths[:, None]
