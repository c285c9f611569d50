"""Logits of which a rank has the columns of its part of the vocabulary.

A model computes with them as with any tensor. Functions of each logit alone run on the own columns.
Cross entropy is computed over all parts. All other functions get the whole logits, which are
gathered then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import smp._C as _C
from smp.nn.embedding import join_features
from smp.nn.layout import Layout
from smp.nn.planned.logit_functions import BY_FUNCTION, BY_NAME, sliced


@dataclass(frozen=True)
class Vocabulary:
    """A split of a vocabulary over ranks.

    Attributes:
        layout: layout of the model; with own batches a rank has its columns of all samples.
        sizes: sizes of the parts, by rank.
    """

    layout: Layout
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def num_batches(self) -> int:
        """Number of batches of which a rank has columns."""
        return self.layout.num_ranks if self.layout.has_own_batches else 1


class SplitLogits:
    """A substitute for logits ``[N, *, vocabulary]`` of the caller's samples.

    It is no tensor, so that no code can take a part for the whole: Python functions of PyTorch get
    the whole or use the split, and C++ refuses it. The whole is gathered once, and then replaces
    the part in this object. All ranks of the group have to do the same with it.

    Args:
        local: ``[all N, *, own part of the vocabulary]``, or the whole.
        vocabulary: split of the vocabulary.
        dtype: dtype of the logits for the caller; float32 for a 16-bit ``local``, which is cast
            where it is read.
        steps: functions applied to the logits so far, equal on all ranks.
        kin: number of objects that share memory with this one, itself included.
        is_whole: whether ``local`` is the whole.
    """

    is_cast_when_read = True  # see `cast_outputs`

    def __init__(
        self,
        local: Tensor,
        vocabulary: Vocabulary,
        dtype: torch.dtype | None = None,
        steps: tuple[Any, ...] = (),
        kin: list[int] | None = None,
        is_whole: bool = False,
    ) -> None:
        self._local, self._vocabulary, self._steps = local, vocabulary, steps
        self._dtype = local.dtype if dtype is None else dtype
        self._is_whole = is_whole
        self._kin = [0] if kin is None else kin
        self._kin[0] += 1

    def whole(self) -> Tensor:
        """Returns ``[N, *, vocabulary]``. Collective over the group the first time."""
        if not self._is_whole:
            # The first reader may be without gradients (a metric), and others are not.
            with torch.enable_grad():
                sizes = list(self._vocabulary.sizes)
                joined = join_features(self._local, sizes, self._vocabulary.layout)
                self._local, self._is_whole = joined.to(self._dtype), True
        return self._local

    @property
    def logits(self) -> Tensor:
        """The whole, see `whole`; results return it to callers."""
        return self.whole()

    # ---- their properties

    @property
    def shape(self) -> torch.Size:
        if self._is_whole:
            return self._local.shape
        first, *rest = self._local.shape[:-1]
        num = self._vocabulary.num_batches
        return torch.Size([first // num, *rest, self._vocabulary.size])

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._local.device

    @property
    def requires_grad(self) -> bool:
        return self._local.requires_grad

    @property
    def ndim(self) -> int:
        return self._local.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._local.dim()

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SplitLogits({list(self.shape)}, {self._dtype}, not gathered)"

    # ---- functions of them

    def _cast(self) -> Tensor:
        return self._local.to(self._dtype)

    def _next(self, local: Tensor, step: Any, is_view: bool = False) -> SplitLogits:
        dtype = self._dtype if local.dtype == self._local.dtype else local.dtype
        kin = self._kin if is_view else None
        return SplitLogits(local, self._vocabulary, dtype, (*self._steps, step), kin)

    def _cast_later(self, dtype: torch.dtype) -> SplitLogits:
        """Returns them with another dtype, to which readers cast."""
        steps = (*self._steps, ())
        return SplitLogits(self._local, self._vocabulary, dtype, steps, self._kin)

    def _to_write(self) -> Tensor:
        if self._kin[0] > 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}logits of which each tensor-parallel rank has a part are "
                "written to, and there are views of them, which would not see it; write to a copy "
                "(.clone()), or leave the head whole by smp.set_tensor_parallelism(model.lm_head, "
                "False) before the model is wrapped"
            )
        return self.whole()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_local":
            raise AttributeError(name)
        known = BY_NAME.get(name)
        if known is not None:
            return lambda *args, **kwargs: _run(known, name, (self, *args), kwargs)
        is_written = name.endswith("_") and not name.startswith("_")
        return getattr(self._to_write() if is_written else self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        known = BY_FUNCTION.get(func)
        return _run(known, func, args, kwargs or {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self._to_write()[_whole(index)] = _whole(value)

    def __bool__(self) -> bool:
        return bool(self.whole())

    def __float__(self) -> float:
        return float(self.whole())

    def __int__(self) -> int:
        return int(self.whole())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole().__array__(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return _run(sliced, "__getitem__", (self, index), {})

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Any:
        return iter(self.whole())

    def __reduce__(self) -> Any:
        members = (self._local, self._vocabulary, self._dtype, self._steps, None, self._is_whole)
        return SplitLogits, members


def _whole(value: Any) -> Any:
    """Returns a value with whole logits in it."""
    if isinstance(value, SplitLogits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(_whole(item) for item in value)
    if type(value) is dict:
        return {key: _whole(item) for key, item in value.items()}
    return value


def _run(
    known: Callable[..., Any] | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Returns the result of a function, computed from the parts if possible.

    Args:
        known: form of the function for parts, which may return NotImplemented; None without one.
        func: the function, or the name of a method.
        args, kwargs: arguments of the function.
    """
    if known is not None and isinstance(args[0] if args else None, SplitLogits):
        if not args[0]._is_whole:
            result = known(*args, **kwargs)
            if result is not NotImplemented:
                return result
    if kwargs.get("out") is not None and isinstance(kwargs["out"], SplitLogits):
        kwargs["out"]._to_write()
    given = [_whole(value) for value in args]
    run = getattr(given[0], func) if isinstance(func, str) else func
    return run(*(given[1:] if isinstance(func, str) else given), **_whole(dict(kwargs)))


def _operator(name: str, known: Callable[..., Any] | None) -> Callable[..., Any]:
    def run(self: SplitLogits, *args: Any) -> Any:
        return _run(known, name, (self, *args), {})

    run.__name__ = name
    return run


def _in_place(name: str, known: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator that changes the object itself; logits with views are refused."""

    def run(self: SplitLogits, *args: Any) -> Any:
        if not self._is_whole and self._kin[0] == 1:
            made = known(self, *args)
            if made is not NotImplemented:
                self._local, self._dtype, self._steps = made._local, made._dtype, made._steps
                return self
        return getattr(self._to_write(), name)(*[_whole(value) for value in args])

    run.__name__ = name
    return run


_OPERATORS = {
    **{"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__add__": "add"},
    **{"__radd__": "add", "__sub__": "sub", "__neg__": "neg"},
}
_OF_WHOLE = (
    *("__rsub__", "__rtruediv__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__", "__abs__"),
    *("__mod__", "__floordiv__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *("__and__", "__or__", "__xor__", "__invert__", "__contains__"),
)
_IN_PLACE = {"__imul__": "mul", "__itruediv__": "div", "__iadd__": "add", "__isub__": "sub"}


def _add_operators() -> None:
    for name, known in _OPERATORS.items():
        setattr(SplitLogits, name, _operator(name, BY_NAME[known]))
    for name in _OF_WHOLE:
        setattr(SplitLogits, name, _operator(name, None))
    for name, known in _IN_PLACE.items():
        setattr(SplitLogits, name, _in_place(name, BY_NAME[known]))


_add_operators()


def _flatten(logits: SplitLogits) -> tuple[list[Any], Any]:
    local = logits._local
    known = (logits._vocabulary, logits._dtype, logits._steps, logits._is_whole)
    return [local], (local.dtype, known)


def _unflatten(members: Any, context: Any) -> SplitLogits:
    [local] = members
    before, (vocabulary, dtype, steps, is_whole) = context
    # A caller that casts tensors at any depth casts these, too; other replacements keep the dtype.
    is_cast = isinstance(local, Tensor) and local.dtype != before
    return SplitLogits(local, vocabulary, local.dtype if is_cast else dtype, steps, None, is_whole)


pytree.register_pytree_node(
    SplitLogits, _flatten, _unflatten, serialized_type_name="smp.nn.planned.SplitLogits"
)
