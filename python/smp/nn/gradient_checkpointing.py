"""``gradient_checkpointing_enable`` of transformers for modules that take the place of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

_FLAG = "gradient_checkpointing"
_PRESERVES = "preserve_rng_state"


class GradientCheckpointing:
    """A mixin of modules with layers that can be checkpointed."""

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Keeps only the arguments of layers in training; their backward computes the rest again.

        Args:
            gradient_checkpointing_kwargs: options; only ``preserve_rng_state``, by default True,
                counts; the others are for torch's own checkpointing.
        """
        options = gradient_checkpointing_kwargs or {}
        _set(self, True, bool(options.get("preserve_rng_state", True)))

    def gradient_checkpointing_disable(self) -> None:
        """Ends checkpointing."""
        _set(self, False, True)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Returns whether any layer is to be checkpointed."""
        assert isinstance(self, nn.Module)
        return any(getattr(module, _FLAG, False) for module in self.modules())


def _set(root: object, enabled: bool, preserve_rng_state: bool) -> None:
    assert isinstance(root, nn.Module)
    for module in root.modules():
        if hasattr(module, _FLAG):
            setattr(module, _FLAG, enabled)
            setattr(module, _PRESERVES, preserve_rng_state)


def take_over_checkpointing(original: nn.Module, made: nn.Module) -> None:
    """Checkpoints the layers of a new module if those of the original were to be."""
    if any(getattr(module, _FLAG, False) for module in original.modules()):
        _set(made, True, True)
