"""Casts operands of a 16-bit model where tensors of 16 bits and wider ones meet.

Buffers keep their dtype and inputs of the model are not cast, so both meet activations of 16
bits. Then PyTorch's elementwise operators return the wider dtype. Its operators that need one
dtype raise an error, and get one here: that of the parameter, else 16 bits, as under autocast. An
operator that PyTorch would run is not changed, so a model that casts by itself computes the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smp.modules.forwards import Forward, WrapperKind, may_be_lifted, wrap_forward

_HALVES = (torch.float16, torch.bfloat16)
_here = threading.local()

Call = tuple[Sequence[Any], Mapping[str, Any]]


class OperandCasts:
    """Casts operands in a model's forwards, including repeated ones and those for other ranks.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._undo: list[Callable[[], None]] = []

    def look_at(self, arguments: Any) -> None:
        """Begins casting with the first call that gets wider floating tensors.

        The call may be of the model, or of a module here for another rank.
        """
        if not self._undo and any(map(_is_wide, pytree.tree_leaves(arguments))):
            self.begin()

    def begin(self) -> None:
        """Begins casting. Models without tensors wider than 16 bits never need this."""
        if not self._undo:
            self._undo = [
                wrap_forward(module, WrapperKind.OPERANDS, _around(module))
                for module in self._root.modules()
            ]

    def close(self) -> None:
        """Restores the forwards of the modules."""
        while self._undo:
            self._undo.pop()()


def _around(module: nn.Module) -> Callable[[Forward], Forward]:
    # Recurrent modules compare dtypes before they call an operator.
    own = next(module.parameters(), None) if isinstance(module, nn.RNNBase) else None
    return _casting if own is None else functools.partial(_recurrent, own.dtype)


def _recurrent(dtype: torch.dtype, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*_cast(args, dtype), **_cast(kwargs, dtype))

    return run


@may_be_lifted
def _casting(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "is_casting", False):
            return forward(*args, **kwargs)
        _here.is_casting = True
        try:
            with _Casts():  # type: ignore[no-untyped-call]
                return forward(*args, **kwargs)
        finally:
            _here.is_casting = False

    return run


class _Casts(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        rule = _RULES.get(getattr(func, "__name__", ""))
        if rule is None or (kwargs and kwargs.get("out") is not None):
            return func(*args, **(kwargs or {}))
        args, kwargs = rule(args, kwargs or {})
        return func(*args, **kwargs)


def _in_one(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Gives all operands the dtype of the parameters among them, else 16 bits."""
    operands = [*_floating(args), *_floating(kwargs)]
    if not _differ(operands):
        return args, kwargs
    own = {operand.dtype for operand in operands if isinstance(operand, nn.Parameter)}
    dtype = own.pop() if len(own) == 1 else _half_of(operands)
    return _cast(args, dtype), _cast(kwargs, dtype)


def _products(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Gives query, key and value of attention one dtype; the mask may have any."""
    named = {key: kwargs[key] for key in ("query", "key", "value") if key in kwargs}
    cast, cast_named = _in_one(args[:3], named)
    return (*cast, *args[3:]), {**kwargs, **cast_named}


def _head(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Gives hidden states, weight and bias of a head one dtype; weights of a loss may have any."""
    named = {"bias": kwargs["bias"]} if "bias" in kwargs else {}
    cast, cast_named = _in_one(args[:2], named)
    return (*cast, *args[2:]), {**kwargs, **cast_named}


def _norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Casts inputs of norms, which may have 16 bits beside float32 statistics and parameters."""
    others = [*_floating(args[1:]), *_floating(kwargs)]
    if _differ(others):
        # Statistics are written to, so they cannot be replaced by a copy.
        args = tuple(map(_widened, args))
        kwargs = {key: _widened(value) for key, value in kwargs.items()}
    elif args and others and others[0].dtype in _HALVES and _differ([args[0], *others]):
        args = (args[0].to(others[0].dtype), *args[1:])
    return args, kwargs


def _widened(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, nn.Parameter) else value


def _loss(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Casts to float32, since losses keep the digits of their targets and weights."""
    if _differ([*_floating(args), *_floating(kwargs)]):
        return _cast(args, torch.float32), _cast(kwargs, torch.float32)
    return args, kwargs


def _written(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Gives values the dtype of the tensor into which they are written."""
    if args and isinstance(args[0], Tensor) and _differ([*_floating(args), *_floating(kwargs)]):
        return (args[0], *_cast(args[1:], args[0].dtype)), _cast(kwargs, args[0].dtype)
    return args, kwargs


_RULES: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], Call]] = {
    **dict.fromkeys(
        (
            *("linear", "fp8_linear", "bilinear", "prelu", "conv1d", "conv2d", "conv3d"),
            *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding_bag"),
            *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner"),
            *("addmm", "addmv", "addbmm", "baddbmm", "addr", "einsum", "tensordot"),
            *("chain_matmul", "multi_dot", "cdist"),
            *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"),
            *("rnn_relu_cell", "multi_head_attention_forward", "grid_sample", "grid_sampler"),
        ),
        _in_one,
    ),
    "scaled_dot_product_attention": _products,
    "linear_cross_entropy": _head,
    **dict.fromkeys(("layer_norm", "group_norm", "batch_norm", "instance_norm"), _norm),
    **dict.fromkeys(
        (
            *("mse_loss", "huber_loss", "binary_cross_entropy", "cross_entropy", "nll_loss"),
            *("binary_cross_entropy_with_logits", "multi_margin_loss", "gaussian_nll_loss"),
        ),
        _loss,
    ),
    **dict.fromkeys(
        (
            *("index_put", "index_put_", "index_add", "index_add_", "index_copy", "index_copy_"),
            *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
            *("scatter_reduce_", "masked_scatter", "masked_scatter_", "addmm_", "addmv_"),
            *("addbmm_", "baddbmm_", "addr_"),
        ),
        _written,
    ),
}


def _floating(operands: Any) -> Iterator[Tensor]:
    values = operands.values() if isinstance(operands, Mapping) else operands
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, tuple | list):
            yield from _floating(value)


def _differ(operands: Sequence[Tensor]) -> bool:
    dtypes = {operand.dtype for operand in operands}
    return len(dtypes) > 1 and not dtypes.isdisjoint(_HALVES)


def _half_of(operands: Sequence[Tensor]) -> torch.dtype:
    return next(operand.dtype for operand in operands if operand.dtype in _HALVES)


def _cast(operands: Any, dtype: torch.dtype) -> Any:
    if isinstance(operands, Tensor):
        return operands.to(dtype) if operands.is_floating_point() else operands
    if isinstance(operands, PackedSequence):
        return operands.to(dtype)
    if isinstance(operands, Mapping):
        return {key: _cast(value, dtype) for key, value in operands.items()}
    if isinstance(operands, tuple | list):
        return type(operands)(_cast(value, dtype) for value in operands)
    return operands


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in _HALVES
