"""Models of transformers in float64 throughout.

They compute rotary angles, softmaxes and losses in float32 whatever their dtype is, so in float64
they are a reference for 1e-7 only.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DIVISIONS = (torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__)


class _Lift(TorchFunctionMode):
    """Code that asks for float32 gets float64, and so does a division of integers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        elif func in _DIVISIONS and not any(_is_real(value) for value in args):
            args = (args[0].double(), *args[1:])
        args = tuple(_lifted(value) for value in args)
        return func(*args, **{name: _lifted(value) for name, value in kwargs.items()})


def _is_real(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _lifted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def lifted_casts(enabled: bool = True) -> Iterator[None]:
    """Makes float64 of every cast to float32 inside.

    Models have to be made inside as well: some compute tables in ``__init__``.

    Args:
        enabled: False for no effect.
    """
    with _Lift() if enabled else contextlib.nullcontext():
        yield


# Modes belong to threads, and modules of a pipeline run in many.
_active = threading.local()


def lift_forwards(model: nn.Module) -> None:
    """Makes all modules of transformers run their forward in `lifted_casts`, in any thread.

    Args:
        model: model that was made inside of `lifted_casts`. Its modules get classes of their own,
            so that no other model is changed.
    """
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            module.__class__ = _lifted_class(type(module))


@functools.cache
def _lifted_class(cls: type[nn.Module]) -> type[nn.Module]:
    original = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(_active, "value", False):
            return original(self, *args, **kwargs)
        _active.value = True
        try:
            with lifted_casts():
                return original(self, *args, **kwargs)
        finally:
            _active.value = False

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
