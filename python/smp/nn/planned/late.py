"""A sum over the ranks that is whole only where code reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import smp._C as _C
from smp.tensor_parallel import regions

# functions and attributes that need no numbers
_OF_SHAPE: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_meta", "is_cuda", "requires_grad")),
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point),
    }
)


class LateSum(Tensor):
    """The result of a row in a block with own batches, summed when code reads it.

    Each function that needs its numbers gets the sum, an ordinary tensor that all of them share. If
    no code has read it at the end of the block, each rank gets its own part of the sum by one
    reduce-scatter. Operations that bypass Python functions reach ``__torch_dispatch__`` and get the
    same sum; gradients go back to the term in any case.
    """

    _term: Tensor
    _row: nn.Module
    _sum: Tensor | None = None

    @staticmethod
    def of(term: Tensor, row: nn.Module) -> LateSum:
        """Returns the sum of a term over the ranks; the sum's gradient is the term's, too.

        Args:
            term: ``[samples of all ranks, *]``, a plain tensor.
            row: row that computed it; if code reads this sum, the row's next one is made at once.
        """
        late: LateSum = _Late.apply(term)
        late._term, late._row = term, row
        return late

    def read(self) -> Tensor:
        """Returns the sum. Collective the first time."""
        if self._sum is None:
            self._row.__dict__["_smp_sums_late"] = False
            with torch.enable_grad():  # the first reader may be without gradients, others not
                self._sum = regions.reduce(self._term)
        return self._sum

    def own_samples(self) -> Tensor | None:
        """Returns this rank's part along dim 0, or None if the sum was read. Collective."""
        return None if self._sum is not None else regions.reduce_scatter(self._term, 0)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _OF_SHAPE and args[0]._sum is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(LateSum, LateSum.read, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Autograd would record a change of this tensor, and not of the sum.
        if func._schema.is_mutable or (func.is_view and func is not torch.ops.aten.detach.default):
            raise RuntimeError(
                f"{_C.rank_prefix()}{func} got what a layer gives that a plan splits by input "
                "features (rowwise), past Python's functions; expected operations that neither "
                "write to it nor make a view of it there. Leave the layer out of the plan"
            )
        given = tree_map_only(LateSum, _numbers, (tuple(args), dict(kwargs or {})))
        return func(*given[0], **given[1])


def _numbers(late: LateSum) -> Tensor:
    return late.read().detach()


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor) -> Tensor:
        late: Tensor = Tensor._make_wrapper_subclass(
            LateSum, term.shape, dtype=term.dtype, device=term.device
        )
        return late

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class OfFirstRank(torch.autograd.Function):
    """The identity for a bias on the first rank, and zeros on the others.

    On every rank the bias gets the gradient of the sum.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return bias.view_as(bias) if regions.rank() == 0 else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]
