"""Functions of tensors of which a rank has a part of the tokens, without the tokens of others.

What is between the last block and the loss treats tokens alone: a norm, the head, a cap, a cast,
and the loss up to its sum. These functions take and give parts; all others get whole tensors.
Tensors beside them are those of the model's code, which all ranks have alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smp.context_parallel import regions
from smp.context_parallel.late_whole import LateWhole, of_tokens
from smp.nn.linear_cross_entropy import linear_cross_entropy

_Function = Callable[..., Any]


# ---- tensors beside each other


def _part_of(x: Any, first: LateWhole) -> Any:
    """Returns an operand of an elementwise function as its part that belongs to another part.

    Returns NotImplemented if it has none.
    """
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, LateWhole):
        return x.part if x.place == first.place and x.dim() == first.dim() else NotImplemented
    dim = first.place.dim - (first.dim() - x.dim())
    if x.dim() > first.dim() or (
        dim >= 0 and x.shape[dim] not in (1, first.shape[first.place.dim])
    ):
        return NotImplemented
    return x if dim < 0 or x.shape[dim] == 1 else first.place.part_of(x, dim)


def _elementwise(func: _Function, *args: Any, **kwargs: Any) -> Any:
    first = next((x for x in args if isinstance(x, LateWhole)), None)
    is_plain = not any(isinstance(x, Tensor) for x in kwargs.values())
    if first is None or not is_plain or kwargs.get("inplace"):
        return NotImplemented
    parts = [_part_of(x, first) for x in args]
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    result = func(*parts, **kwargs)
    has_shape = result.dim() == first.dim() and result.shape[first.place.dim] == first.place.size
    return LateWhole.of(result, first.place) if has_shape else NotImplemented


def _unary(func: _Function, x: Any, *args: Any, **kwargs: Any) -> Any:
    # True without a name may say that the tensor is to be changed.
    if any(isinstance(value, Tensor) or value is True for value in (*args, *kwargs.values())):
        return NotImplemented
    result = _elementwise(func, x, *args, **kwargs)
    if result is NotImplemented or result.part.data_ptr() != x.part.data_ptr():
        return result
    return x.viewed(result.part, x.place, lambda whole: func(whole, *args, **kwargs))


# ---- functions of features


def _along(func: _Function, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes sums, means and softmax along dims of features."""
    given = inspect.signature(_reduction).bind(x, *args, **kwargs)
    dims = given.arguments.get("dim")
    if not isinstance(x, LateWhole) or dims is None:
        return NotImplemented
    found = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    stays = given.arguments.get("keepdim", False) or func in _KEEPING
    if not found or x.place.dim in found or not (stays or min(found) > x.place.dim):
        return NotImplemented
    return LateWhole.of(func(x.part, *args, **kwargs), x.place)


def _reduction(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> None:
    """Names the arguments of `_along`."""


def _linear(func: _Function, x: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    is_late = isinstance(x, LateWhole) and not isinstance(weight, LateWhole)
    if not is_late or x.place.dim == x.dim() - 1:
        return NotImplemented
    return LateWhole.of(func(x.part, weight, bias), x.place)


def _norm(func: _Function, x: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, LateWhole) or x.place.dim >= x.dim() - len(normalized_shape):
        return NotImplemented
    return LateWhole.of(func(x.part, normalized_shape, *args, **kwargs), x.place)


# ---- views


def _sliced(func: _Function, x: Any, index: Any) -> Any:
    given = index if isinstance(index, tuple) else (index,)
    is_all = all(i is Ellipsis or i in (slice(None), slice(0, None)) for i in given)
    is_valid = len(given) <= x.dim()
    return x if isinstance(x, LateWhole) and is_all and is_valid else NotImplemented


def _reshaped(func: _Function, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Joins samples and tokens to rows, as losses want them."""
    if not isinstance(x, LateWhole) or any(not _is_size(value) for value in args) or kwargs:
        return NotImplemented
    shape = tuple(func(torch.empty(x.shape, device="meta"), *args).shape)
    if shape == tuple(x.shape):
        return x
    if x.dim() != 3 or x.place.dim != 1 or shape != (x.shape[0] * x.shape[1], x.shape[2]):
        return NotImplemented
    place = x.place.flat(x.shape[0])
    return x.viewed(x.part.flatten(0, 1), place, lambda whole: func(whole, *args))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) or (
        isinstance(value, tuple | list) and all(isinstance(x, int) for x in value)
    )


def _transposed(func: _Function, x: Any, one: int, other: int) -> Any:
    if not isinstance(x, LateWhole) or x.place.num_samples:
        return NotImplemented
    dims = {one % x.dim(): other % x.dim(), other % x.dim(): one % x.dim()}
    place = x.place.at(dims.get(x.place.dim, x.place.dim))
    return x.viewed(func(x.part, one, other), place, lambda whole: func(whole, one, other))


# ---- losses


def _cross_entropy(
    func: _Function,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_plain = size_average is None and reduce is None and isinstance(target, Tensor)
    if not is_plain or type(target) is not Tensor or target.dtype != torch.int64:
        return NotImplemented
    tokens_dim = 0 if target.dim() == 1 else target.dim()
    if not isinstance(input, LateWhole) or input.place.dim != tokens_dim:
        return NotImplemented
    if target.shape != (*input.shape[:1], *input.shape[2:]):
        return NotImplemented
    targets = input.place.part_of(target, target.dim() - 1)
    losses = func(
        input.part,
        targets,
        weight,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        return LateWhole.of(losses, input.place.at(target.dim() - 1))
    total = regions.sum_of_parts(losses)
    if reduction == "sum":
        return total
    counted = target != ignore_index
    if weight is None:
        return total / counted.sum()
    return total / (weight[target.where(counted, target.new_zeros(()))] * counted).sum()


def _linear_cross_entropy(
    func: _Function, hidden: Any, weight: Any, labels: Any, **given: Any
) -> Any:
    weights = given.get("token_weights")
    if not isinstance(hidden, LateWhole) or hidden.place.dim != hidden.dim() - 2:
        return NotImplemented
    if any(isinstance(x, LateWhole) for x in (weight, labels, *given.values())):
        return NotImplemented
    if labels.shape != hidden.shape[:-1] or given.get("vocab_size") is not None:
        return NotImplemented
    reduction = given.pop("reduction", "mean")
    if weights is not None:
        given["token_weights"] = hidden.place.part_of(weights, weights.dim() - 1)
    part = hidden.place.part_of(labels, labels.dim() - 1)
    kind = "none" if reduction == "none" else "sum"
    losses = func(hidden.part, weight, part, reduction=kind, **given)
    if reduction == "none":
        return LateWhole.of(losses, hidden.place.at(labels.dim() - 1))
    total = regions.sum_of_parts(losses)
    if reduction == "sum":
        return total
    counted = labels != given.get("ignore_index", -100)
    factors = counted.to(total) if weights is None else counted * weights.to(total)
    classes = given.get("class_weights")
    if classes is not None:
        factors = factors * classes[labels.where(counted, labels.new_zeros(()))].to(total)
    return total / factors.sum()


def _named(*names: str) -> Iterator[_Function]:
    """Yields the functions and methods of these names."""
    for name in names:
        for holder in (torch, Tensor, F):
            if hasattr(holder, name):
                yield getattr(holder, name)


_BINARY = ("add", "sub", "mul", "div", "true_divide", "pow", "rsub", "maximum", "minimum")
_DUNDERS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg")
_UNARY = (
    *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "tanh", "sigmoid"),
    *("relu", "silu", "gelu", "clamp", "float", "double", "half", "bfloat16", "to", "type"),
    *("contiguous", "clone", "detach"),
)
_KEEPING = frozenset(_named("softmax", "log_softmax"))
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named(*_BINARY, *(f"__{name}__" for name in _DUNDERS)), _elementwise),
    **dict.fromkeys(_named(*_UNARY), _unary),
    **dict.fromkeys(_named("mean", "sum"), _along),
    **dict.fromkeys(_KEEPING, _along),
    **dict.fromkeys(_named("view", "reshape", "flatten"), _reshaped),
    **dict.fromkeys(_named("transpose"), _transposed),
    **dict.fromkeys(_named("layer_norm", "rms_norm"), _norm),
    Tensor.__getitem__: _sliced,
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
    linear_cross_entropy: _linear_cross_entropy,
}


def install() -> None:
    """Lets tensors of parts use these functions."""
    of_tokens.update(_FUNCTIONS)
