"""Borders between tensors of one rank of a tensor-parallel group and tensors of the whole group.

Each function here works on the tensor-parallel group of the running `smp.init` and is collective
over it: all its ranks call the same functions in one order, forward and backward. In a group of one
rank they are the identity. No region has a second derivative.

`sizes` are the extents of the ranks' parts along a dim, in the order of the ranks, for uneven
splits; without it all parts are alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

import smp._C as _C
from smp.modules.transforms import has_tangent
from smp.world import runtime

Sizes = Sequence[int] | None
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _of_data(region: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a region accept handles of remote tensors, and refuse nested ones and torch.func."""

    @wraps(region)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensors = (*args, *kwargs.values())
        of_args = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        if any(tensor.is_nested for tensor in of_args):
            raise _refused("is given a nested tensor", "cannot exchange those; pad them")
        if has_torch_function(tensors):
            result: Any = handle_torch_function(call, tensors, *args, **kwargs)
            return result  # type: ignore[no-any-return]
        if torch._C._are_functorch_transforms_active() or any(map(has_tangent, of_args)):
            raise _refused(
                "is called inside of a transform of torch.func (vmap, grad, jvp, ...)",
                "cannot exchange tensors there",
            )
        return region(*args, **kwargs)

    return call


def _refused(what: str, why: str) -> RuntimeError:
    layer = _C.exchange_layer_name("")  # the function that set the name restores the previous one
    named = f"the split layer '{layer}'" if layer else "a split layer"
    return RuntimeError(
        f"{_C.rank_prefix()}{named} {what}, and its ranks {why}; or leave it whole by "
        "smp.set_tensor_parallelism(module, False) before the model is wrapped"
    )


def in_layer(name: str, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Calls a function whose regions belong to a layer.

    Ranks whose data choose different layers of one shape would compute on each other's samples. So
    the regions of a forward raise if the ranks' layer names differ.
    """
    before = _C.exchange_layer_name(name)
    try:
        return call(*args, **kwargs)
    finally:
        _C.exchange_layer_name(before)


def _group() -> _C.TensorParallelGroup:
    return runtime.current().rank.comms.tp_group


def _sizes(sizes: Sizes) -> list[int]:
    return [] if sizes is None else list(sizes)


def rank() -> int:
    """Returns the place of this process in its tensor-parallel group."""
    return _group().group_rank


def size() -> int:
    """Returns the number of ranks of the tensor-parallel group."""
    return _group().size


def traffic() -> tuple[int, int]:
    """Returns the number of collectives so far, and the least bytes this rank had to send."""
    return _group().traffic()


@contextmanager
def alone() -> Iterator[None]:
    """Stops communication of this thread's regions, for a trial run of a model on one rank.

    Results have the right shapes; values are as if all ranks held the same, and sums are not
    taken. Tensors without data (meta, fake) are always treated so.
    """
    before = _C.set_tensor_parallel_alone(True)
    _trial.depth += 1
    try:
        yield
    finally:
        _trial.depth -= 1
        _C.set_tensor_parallel_alone(before)


class _Trial(threading.local):
    """The number of `alone` contexts that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0


_trial = _Trial()


def is_alone() -> bool:
    """Returns whether this thread's regions do not communicate, see `alone`."""
    return _trial.depth > 0


@_of_data
def copy(x: Tensor) -> Tensor:
    """Returns a tensor that all ranks have alike, unchanged. Backward: sum over the ranks."""
    return _group().copy(x)


@_of_data
def reduce(x: Tensor) -> Tensor:
    """Sums over the ranks. Backward: the same gradient."""
    return _group().reduce(x)


@_of_data
def gather(x: Tensor, dim: int, sizes: Sizes = None, grad: Literal["sum", "own"] = "sum") -> Tensor:
    """Concatenates the parts of all ranks.

    Args:
        x: part of this rank.
        dim: dim of the concatenation.
        sizes: sizes of the parts.
        grad: backward of the region. "sum": the ranks use the result with different weights, so
            each gradient is a part of a sum (reduce-scatter). "own": all ranks use it alike (own
            slice).
    """
    if grad not in ("sum", "own"):
        raise ValueError(f"gather: grad must be 'sum' or 'own', got {grad!r}")
    return _group().gather(x, dim, _sizes(sizes), grad == "sum")


@_of_data
def gathered(x: Tensor, whole: Tensor) -> Tensor:
    """Returns the result of an earlier `gather`, to be used with other weights on each rank.

    Backward: reduce-scatter, as in `gather` with `grad="sum"`; the gradient is that of `x`, and
    `whole` gets none. Forward communicates nothing.

    Args:
        x: part of this rank along dim 0; all parts have one shape.
        whole: result of `gather` for `x`, unchanged since.

    Raises:
        ValueError: the part is not one of this whole.
    """
    if whole.shape != (x.shape[0] * size(), *x.shape[1:]):
        raise ValueError(
            f"{_C.rank_prefix()}gathered: expected the tensors of {size()} ranks of shape "
            f"{list(x.shape)} along dim 0, got {list(whole.shape)}"
        )
    # No edge to the whole: the gradient takes one way.
    result: Tensor = _Gathered.apply(x, whole.detach())
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor) -> Tensor:
        ctx.was_alone = is_alone()
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with alone() if ctx.was_alone else nullcontext():
            return reduce_scatter(grads[0], 0), None


@_of_data
def reduce_scatter(x: Tensor, dim: int, sizes: Sizes = None) -> Tensor:
    """Returns this rank's part of the sum over the ranks. Backward: all-gather."""
    return _group().reduce_scatter(x, dim, _sizes(sizes))


@_of_data
def scatter(x: Tensor, dim: int, sizes: Sizes = None) -> Tensor:
    """Returns this rank's part of a tensor that all ranks have alike. Backward: all-gather."""
    return _group().scatter(x, dim, _sizes(sizes))


@_of_data
def exchange(
    x: Tensor,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sizes = None,
    concat_sizes: Sizes = None,
) -> Tensor:
    """Splits one dim and makes another one whole, by an all-to-all. Backward: the inverse.

    Args:
        x: whole along `split_dim`, the part of this rank along `concat_dim`.
        split_dim, concat_dim: two different dims.
        split_sizes, concat_sizes: sizes of the parts along these dims.
    """
    return _group().exchange(x, split_dim, concat_dim, _sizes(split_sizes), _sizes(concat_sizes))


@_of_data
def gathered_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int | None,
    sizes: Sizes = None,
    fp8: str | None = None,
) -> list[Tensor]:
    """Multiplies one gathered input by several weights.

    Only the part of this rank is kept for backward, where it is gathered again; the sum of the
    input gradients is reduce-scattered once.

    Args:
        x: [..., features]; the part of this rank along `dim`.
        weights: each [out, features].
        biases: one for each weight, or None.
        dim: dim along which `x` is gathered, not the last; None: all ranks have `x` alike, and its
            gradient is summed over the ranks. Pieces [c, 1, ..., features] are gathered along dim 1
            one by one, each beside the products of the one before.
        sizes: sizes of the parts along `dim`.
        fp8: scaling of 8-bit operands, "rowwise" or "tensorwise"; None: operands keep their dtype.

    Returns:
        One [..., out] for each weight.
    """
    return _group().gathered_linears(x, list(weights), list(biases), dim, _sizes(sizes), fp8)


@_of_data
def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str, *, splits_in: bool
) -> Tensor:
    """Computes a linear layer, of which ranks hold parts, with 8-bit operands.

    The result is this rank's part of the features, or its term of their sum, as `F.linear` would
    compute it. Ranks exchange the largest numbers where parts share a factor.

    Args:
        x: [..., in] of this rank.
        weight: [out, in] of this rank.
        bias: [out] of this rank, or None.
        scaling: "rowwise" or "tensorwise".
        splits_in: whether ranks hold parts of the input features; else of the output features.
    """
    return _group().fp8_linear(x, weight, bias, scaling, splits_in=splits_in)


@_of_data
def summed_linear(x: Tensor, weight: Tensor, other: Tensor | None = None) -> Tensor:
    """Multiplies pieces of all ranks by a weight, and sums them over the ranks.

    The sum of a piece is on its way while the next one is multiplied. Backward gathers gradients in
    the same way.

    Args:
        x: [pieces, ranks, ..., own features].
        weight: [out, own features].
        other: second term of this rank, [pieces, ranks, ..., out].

    Returns:
        This rank's part [pieces, 1, ..., out].
    """
    return _group().summed_linear(x, weight, other)


def num_pieces(part: Tensor, extent: int) -> int:
    """Returns in how many pieces this rank's part of a tensor is gathered beside products.

    Args:
        part: own part.
        extent: size of the dim that pieces cut, which their number divides.
    """
    return _group().num_pieces(part, extent)


@_of_data
def vocabulary_embedding(
    ids: Tensor, table: Tensor, begin: int, padding_id: int | None = None
) -> Tensor:
    """Looks up rows of a table that is split along the vocabulary; not summed over the ranks.

    Args:
        ids: integers of any shape; ids of other ranks give rows of zeros and no gradient.
        table: [rows, features] of this rank.
        begin: id of its first row.
        padding_id: id whose row gets no gradient.
    """
    return _C.vocabulary_embedding(ids, table, begin, -1 if padding_id is None else padding_id)


@_of_data
def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    begin: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    vocab_size: int,
) -> Tensor:
    """Computes the cross entropy of logits whose vocabulary is split over the ranks.

    The logits are not moved: the ranks exchange three numbers per token in forward, nothing in
    backward.

    Args:
        logits: [tokens, entries of this rank].
        targets: int64 [tokens], the same on all ranks.
        begin: first entry of this rank.
        ignore_index: target of tokens without a loss.
        label_smoothing: amount of smoothing, as in `torch.nn.functional.cross_entropy`.
        vocab_size: entries of all ranks.

    Returns:
        Loss per token [tokens], 0 where ignored; float32, or float64 for such logits.

    Raises:
        ValueError: a target is outside of the vocabulary.
    """
    return _group().vocabulary_cross_entropy(
        logits,
        targets,
        begin=begin,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def all_say(says: bool, what: str) -> bool:
    """Returns whether all ranks pass True. Only hosts communicate, so no device is waited for.

    Args:
        says: answer of this rank.
        what: words for errors.
    """
    return _group().all_say(says, what)


def own_seed() -> int:
    """Returns a seed that differs on each rank of the group: for dropout of split tensors.

    Draws from the default generator once; not collective.
    """
    return _group().own_seed()


def common_seed() -> int:
    """Returns a seed that is the same on each rank of the group: for dropout of common tensors.

    Draws from the default generator once, on every rank.
    """
    return _group().common_seed()
