"""Models of transformers in float64 throughout.

They compute rotary angles, softmaxes and losses in float32 whatever their dtype is, so in float64
they are a reference for 1e-7 only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
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
