"""The levels that public scripts expect between `DistributedModel` and the user's module."""

from __future__ import annotations

from typing import Any

from torch import nn


def alias_forwards(root: nn.Module) -> None:
    """Gives the classes of a model's modules ``_orig_forward``, another name of their ``forward``.

    Scripts call ``super()._orig_forward(...)`` in subclasses of modules; ``super().forward(...)``
    works as well, because only instances ever get another forward.
    """
    for cls in {cls for module in root.modules() for cls in type(module).__mro__}:
        forward = cls.__dict__.get("forward")
        if forward is not None and cls is not nn.Module and "_orig_forward" not in cls.__dict__:
            setattr(cls, "_orig_forward", forward)  # noqa: B010 - not in the type of a class


class ModuleWrapper(nn.Module):
    """The level between DistributedModel and the user's module that public scripts expect.

    In fp16 training they expect two of them.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
