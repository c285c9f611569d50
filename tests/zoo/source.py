"""Random values for a model: what the configuration says about their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.configs import nested
from tests.zoo.rules import FIRST_WORD, IMAGE

BATCH = 2  # samples of a microbatch
SEQUENCE = 8
CLASSES = 2
FRAMES = 64
SAMPLES = 1600

Inputs = dict[str, Any]


class NoRecipe(RuntimeError):
    """An error of models that give no loss with the inputs that were tried."""


class Source:
    """Random values of one microbatch for one model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, seed: int) -> None:
        self.model = model
        self.config: Any = model.config
        self.dtype = dtype
        self.parameters = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(seed)

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that the configuration or a nested one has."""
        for name in names:
            for config in _all_configs(self.config):
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def number(self, *names: str, default: int) -> int:
        value = self.setting(*names, default=default)
        return int(value[0] if isinstance(value, (list, tuple)) else value)

    def real(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def words(self, *shape: int) -> Tensor:
        size = self.number("vocab_size", default=99)
        return self.integers(min(FIRST_WORD, size // 2), size, *shape)

    def takes(self, name: str) -> bool:
        return name in self.parameters

    @property
    def channels(self) -> int:
        return self.number("num_channels", "in_channels", "in_chans", default=3)

    @property
    def sides(self) -> tuple[int, int]:
        # A norm over two numbers, of the last stage of a backbone, makes much of rounding.
        side = 2 * IMAGE if self.setting("backbone_config") is not None else IMAGE
        value = self.setting("image_size", "img_size", "crop_size", "resolution", default=side)
        if isinstance(value, dict):
            value = [value["height"], value["width"]]
        sides = list(value) if isinstance(value, (list, tuple)) else [value, value]
        ratios = self.setting("scaled_images_ratios")
        if ratios:  # the smallest of the scaled pictures is a patch
            sides = [int(self.number("patch_size", default=8) / min(ratios))]
        return int(sides[0]), int(sides[-1])


def _all_configs(config: Any) -> Iterator[Any]:
    yield config
    for inner in nested(config).values():
        yield from _all_configs(inner)
