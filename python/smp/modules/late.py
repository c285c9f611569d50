"""Tensors whose numbers ranks exchange only where code reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import smp._C as _C

# functions and attributes that need no numbers
_OF_SHAPE: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_meta", "is_cuda", "requires_grad")),
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point),
    }
)


class LateTensor(Tensor):
    """A tensor without numbers, for which each function that needs them gets an ordinary tensor.

    All readers share that tensor. Operations that bypass Python functions reach
    ``__torch_dispatch__`` and get the same numbers.

    Attributes:
        origin: words for errors, which say what gives such tensors.
    """

    origin = "what a module gives"
    _numbers: Tensor | None = None

    def read(self) -> Tensor:
        """Returns the tensor with numbers. Collective the first time."""
        if self._numbers is None:
            with torch.enable_grad():  # the first reader may be without gradients, others not
                self._numbers = self._read()
        return self._numbers

    @property
    def was_read(self) -> bool:
        """Returns whether code has read the numbers."""
        return self._numbers is not None

    def _read(self) -> Tensor:
        """Makes the numbers, once."""
        raise NotImplementedError

    @property
    def source(self) -> Tensor:
        """Returns the tensor from which the numbers are made, which has the graph."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _OF_SHAPE and args[0]._numbers is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(LateTensor, LateTensor.read, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Autograd would record a change of this tensor, and not of the one with numbers.
        if func._schema.is_mutable or (func.is_view and func is not torch.ops.aten.detach.default):
            raise RuntimeError(
                f"{_C.rank_prefix()}{func} got {cls.origin}, past Python's functions; expected "
                "operations that neither write to it nor make a view of it there"
            )
        given = tree_map_only(LateTensor, _detached, (tuple(args), dict(kwargs or {})))
        return func(*given[0], **given[1])


def _detached(late: LateTensor) -> Tensor:
    return late.read().detach()
