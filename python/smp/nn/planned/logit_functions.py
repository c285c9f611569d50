"""Functions of logits of which a rank has some columns, without the columns of other ranks.

Each function takes `SplitLogits` first, and returns NotImplemented where it needs the whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smp.tensor_parallel import regions, sharding

_HALVES = (torch.float16, torch.bfloat16)


# ---- functions of each logit alone


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _pointwise(name: str) -> Callable[..., Any]:
    """Returns a function that takes numbers only: tensors may differ between ranks."""

    def run(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not all(_is_number(value) for value in args):
            return NotImplemented
        return logits._next(getattr(logits._cast(), name)(*args), (name, args))

    return run


def _copied(name: str) -> Callable[..., Any]:
    def run(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return NotImplemented
        is_view = name != "clone"
        return logits._next(getattr(logits._local, name)(), (), is_view)

    return run


def _to_float(logits: Any) -> Any:
    if logits.dtype == torch.float32:
        return logits
    if logits._local.dtype not in _HALVES:
        return logits._next(logits._local.float(), ())
    return logits._cast_later(torch.float32)


def _to(logits: Any, *args: Any, **kwargs: Any) -> Any:
    asked = [*args, *kwargs.values()]
    if not set(kwargs) <= {"dtype", "device"} or len(asked) != 1:
        return NotImplemented
    if asked[0] == torch.float32:
        return _to_float(logits)
    if isinstance(asked[0], torch.dtype) and asked[0].is_floating_point:
        return logits._next(logits._cast().to(asked[0]), ("to", str(asked[0])))
    is_device = isinstance(asked[0], str | torch.device)
    return logits if is_device and torch.device(asked[0]) == logits.device else NotImplemented


# ---- views that keep the vocabulary as it is


def _reshaped(name: str) -> Callable[..., Any]:
    def run(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            return NotImplemented
        empty = torch.empty(logits.shape, device="meta")
        *leading, last = getattr(empty, name)(*args, **kwargs).shape
        if last != logits._vocabulary.size or not leading:
            return NotImplemented
        # Samples of a rank follow those of the rank before, whatever their dims are.
        leading[0] *= logits._vocabulary.num_batches
        method = "reshape" if name != "view" else "view"
        local = getattr(logits._local, method)(*leading, logits._local.shape[-1])
        return logits._next(local, (), is_view=True)

    return run


def sliced(logits: Any, index: Any) -> Any:
    """Returns slices of positions within samples; neither samples nor vocabulary are sliced."""
    given = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(x, slice | int) and x is not Ellipsis for x in given):
        return NotImplemented
    if any(isinstance(x, bool) for x in given):
        return NotImplemented
    num_missing = logits.ndim - sum(x is not Ellipsis for x in given)
    places = [i for i, x in enumerate(given) if x is Ellipsis] or [len(given)]
    if len(places) > 1 or num_missing < 0:
        return NotImplemented
    before, behind = given[: places[0]], given[places[0] + 1 :]
    full = (*before, *[slice(None)] * num_missing, *behind)
    if full[0] != slice(None) or full[-1] != slice(None):
        return NotImplemented
    return logits._next(logits._local[full], ("[]", str(full)), is_view=True)


# ---- the loss


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes `torch.nn.functional.cross_entropy` without the logits of other ranks."""
    is_plain = weight is None and size_average is None and reduce is None
    fits = isinstance(target, Tensor) and target.dtype == torch.int64 and input.ndim == 2
    is_known = reduction in ("none", "sum", "mean")
    if not (is_plain and fits and is_known and target.shape == input.shape[:1]):
        return NotImplemented
    vocabulary = input._vocabulary
    layout = vocabulary.layout
    targets = target
    if layout.has_own_batches:
        said = repr((input._steps, ignore_index, label_smoothing))
        targets = _targets_of_all(target, zlib.crc32(said.encode()))
    losses = regions.vocabulary_cross_entropy(
        input._local,
        targets,
        sharding.begin_of(vocabulary.sizes),
        ignore_index,
        label_smoothing,
        vocab_size=vocabulary.size,
    )
    losses = layout.own_samples(losses)
    if not torch.is_autocast_enabled(losses.device.type):
        losses = losses.to(input.dtype)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _targets_of_all(target: Tensor, said: int) -> Tensor:
    """Gathers the targets of all ranks, whose logits have to be made in the same way.

    Raises:
        RuntimeError: a rank has applied other functions to its logits.
    """
    own = torch.cat([target, target.new_full((1,), said)])
    found = regions.gather(own[None], 0, grad="own")  # [ranks, own targets + 1]
    if not regions.is_alone() and not found.is_meta:
        torch._assert_async(
            (found[:, -1] == said).all(),
            "tensor-parallel ranks have done different things to their logits (numbers that they "
            "are multiplied with, slices, ignore_index); with own batches they compute the "
            "samples of all of them together, so these have to be the same. Use prescaled_batch",
        )
    return found[:, :-1].flatten()


BY_NAME: dict[str, Callable[..., Any]] = {
    **{name: _pointwise(name) for name in ("mul", "div", "add", "sub", "tanh", "neg")},
    **{name: _copied(name) for name in ("contiguous", "clone", "detach")},
    **{name: _reshaped(name) for name in ("view", "reshape", "flatten")},
    "float": _to_float,
    "double": lambda logits: _to(logits, torch.float64),
    "to": _to,
}
BY_FUNCTION: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, n): BY_NAME[n] for n in ("mul", "div", "add", "sub", "tanh", "neg")},
    **{getattr(torch, n): BY_NAME[n] for n in ("clone", "detach", "reshape", "flatten")},
    torch.true_divide: BY_NAME["div"],
    F.tanh: BY_NAME["tanh"],
    F.cross_entropy: _cross_entropy,
}
