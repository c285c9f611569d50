"""Magnitudes of DoRA on the meta device: norms of rows of other parameters, which come first.

PEFT computes them when adapters are added, from the values of the base layer and of the adapter.
Where these are made when the model is partitioned, so are the magnitudes, by PEFT's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from smp.modules.materialize import exchange


class Magnitudes:
    """The magnitudes of a model that wait for their values.

    Args:
        root: the user's model.

    Attributes:
        late: the magnitudes.
        read: parameters of adapters from which they are computed.
    """

    def __init__(self, root: nn.Module) -> None:
        self._found = list(_late_magnitudes(root))
        self.late: set[Tensor] = {magnitude.weight for _, _, magnitude in self._found}
        self.read: set[Tensor] = {
            matrix.weight for layer, name, _ in self._found for matrix in _matrices(layer, name)
        }

    def make(
        self, is_local: Callable[[Tensor], bool], on_ready: Callable[[nn.Parameter], None]
    ) -> None:
        """Computes the local magnitudes, whose base layers and adapters have values.

        Args:
            is_local: whether a parameter belongs to this rank.
            on_ready: called with each of `late` and `read` that is local.
        """
        for layer, name, magnitude in self._found:
            held, (down, up) = magnitude.weight, _matrices(layer, name)
            if is_local(held):
                magnitude.update_layer(
                    base_layer=layer.get_base_layer(),
                    lora_A=down.weight,
                    lora_B=up.weight,
                    scaling=layer.scaling[name],
                )
                made, magnitude.weight = magnitude.weight, held
                exchange(held, made.detach().to(held.dtype))
            for parameter in (held, down.weight, up.weight):
                if is_local(parameter):
                    on_ready(parameter)


def _matrices(layer: Any, name: str) -> tuple[Any, Any]:
    return layer.lora_A[name], layer.lora_B[name]


def _late_magnitudes(root: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yields layer, name of the adapter, and module of the magnitude."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    if layers is None:
        return
    for layer in root.modules():
        if isinstance(layer, layers.LoraLayer):
            for name, magnitude in layer.lora_magnitude_vector.items():
                if magnitude.weight.is_meta:
                    yield layer, name, magnitude
