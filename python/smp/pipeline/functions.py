"""Lists functions that apply to a tensor of another rank without bringing its data here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from smp._torch_releases import getters
from smp.tensor_parallel import regions

_aten = torch.ops.aten


#: Properties that a handle answers without its data.
METADATA: frozenset[Any] = frozenset(
    getters(
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
        *("is_mps", "is_xpu", "is_xla", "is_ipu", "is_vulkan", "is_maia", "is_sparse_csr"),
        *("itemsize", "nbytes", "names", "output_nr"),
    )
    | {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
        *(Tensor.is_signed, Tensor.element_size, Tensor.get_device, Tensor.is_contiguous),
        *(Tensor.storage_offset, Tensor.__len__, Tensor.__hash__, torch.numel, Tensor.is_inference),
    }
)

#: Functions that make a new tensor of the same shape, dtype and device.
LIKE: frozenset[Any] = frozenset(
    {
        *(torch.ones_like, torch.zeros_like, torch.full_like, torch.empty_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
    }
)

#: Functions on the gradient of a handle, whichever rank made it.
HOOKS: frozenset[Any] = frozenset(
    {Tensor.register_hook, Tensor.retain_grad, *getters("grad", "retains_grad")}
)

#: Arithmetic that is done at the home of the tensors, by operator.
AT_HOME: dict[Any, str] = {
    _aten.add.Tensor: "add",
    _aten.sub.Tensor: "sub",
    _aten.mul.Tensor: "mul",
    _aten.div.Tensor: "div",
    _aten.mul.Scalar: "mul",
    _aten.div.Scalar: "div",
    _aten.neg.default: "neg",
}

#: Python functions that lead to the operators above and to nothing else.
ARITHMETIC: dict[Any, str] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), "add"),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), "sub"),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), "mul"),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), "div"),
    **dict.fromkeys((torch.neg, Tensor.neg, Tensor.__neg__), "neg"),
}

#: In-place arithmetic, with the function that computes the same out of place.
IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    Tensor.__iadd__: torch.add,
    Tensor.add_: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.sub_: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.mul_: torch.mul,
    Tensor.__itruediv__: torch.div,
    Tensor.div_: torch.div,
}

#: Views, which travel as a recipe. Their further arguments hold no tensors.
VIEWS: dict[Any, str] = {
    Tensor.view: "view",
    Tensor.__getitem__: "__getitem__",
    **dict.fromkeys((Tensor.t, torch.t), "t"),
    **dict.fromkeys(
        (Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
        + (Tensor.swapdims, torch.swapdims),
        "transpose",
    ),
    **dict.fromkeys((Tensor.movedim, torch.movedim, Tensor.moveaxis, torch.moveaxis), "movedim"),
    **dict.fromkeys((Tensor.permute, torch.permute), "permute"),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), "squeeze"),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), "unsqueeze"),
    **dict.fromkeys((Tensor.select, torch.select), "select"),
    **dict.fromkeys((Tensor.narrow, torch.narrow), "narrow"),
    **dict.fromkeys((Tensor.reshape, torch.reshape), "reshape"),
    **dict.fromkeys((Tensor.flatten, torch.flatten), "flatten"),
    **dict.fromkeys((Tensor.unflatten, torch.unflatten), "unflatten"),
    **dict.fromkeys((Tensor.diagonal, torch.diagonal), "diagonal"),
    Tensor.expand: "expand",
    Tensor.unfold: "unfold",
}

#: Attributes that are views, with name and arguments of the view.
VIEW_ATTRIBUTES: dict[Any, tuple[str, tuple[int, ...]]] = {
    Tensor.mT.__get__: ("transpose", (-2, -1)),  # type: ignore[attr-defined]
}

#: Functions that take a tensor apart, into views.
PIECES: dict[Any, str] = {
    **dict.fromkeys((Tensor.chunk, torch.chunk), "chunk"),
    **dict.fromkeys((Tensor.split, torch.split), "split"),
    **dict.fromkeys((Tensor.split_with_sizes, torch.split_with_sizes), "split_with_sizes"),
    **dict.fromkeys((Tensor.tensor_split, torch.tensor_split), "tensor_split"),
    **dict.fromkeys((Tensor.unbind, torch.unbind), "unbind"),
    Tensor.__iter__: "unbind",
}

#: Views in which an element of the whole may occur several times.
REPEATING = frozenset({"expand", "unfold"})

#: Functions that run at the home of their first argument: losses, whose operand is large and whose
#: result is small, functions between the layers of a block, and copies.
SHIPPED: dict[Any, str] = {
    functional.gelu: "gelu",
    functional.relu: "relu",
    torch.relu: "relu",
    Tensor.relu: "relu",
    functional.silu: "silu",
    functional.leaky_relu: "leaky_relu",
    functional.elu: "elu",
    functional.mish: "mish",
    functional.softplus: "softplus",
    functional.tanh: "tanh",
    torch.tanh: "tanh",
    Tensor.tanh: "tanh",
    functional.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid",
    functional.softmax: "softmax",
    functional.dropout: "dropout",
    functional.cross_entropy: "cross_entropy",
    regions.vocabulary_cross_entropy: "vocabulary_cross_entropy",
    functional.nll_loss: "nll_loss",
    functional.mse_loss: "mse_loss",
    functional.l1_loss: "l1_loss",
    functional.smooth_l1_loss: "smooth_l1_loss",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy_with_logits",
    functional.log_softmax: "log_softmax",
    functional.kl_div: "kl_div",
    functional.binary_cross_entropy: "binary_cross_entropy",
    Tensor.sum: "sum",
    torch.sum: "sum",
    Tensor.mean: "mean",
    torch.mean: "mean",
    Tensor.contiguous: "contiguous",
    Tensor.clone: "clone",
    torch.clone: "clone",
    Tensor.float: "float",
    Tensor.to: "to",
}

_BY_NAME: dict[str, Callable[..., Any]] = {
    name: getattr(functional if hasattr(functional, name) else Tensor, name)
    for name in (*SHIPPED.values(), *ARITHMETIC.values())
    if name != "vocabulary_cross_entropy"
} | {"vocabulary_cross_entropy": regions.vocabulary_cross_entropy}

#: Names of views and their arguments after the first, in the order of application.
Recipe = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]


def shipped(name: str) -> Callable[..., Any]:
    """Returns the function of :data:`SHIPPED` with this name."""
    return _BY_NAME[name]


def apply(recipe: Recipe, tensor: Tensor) -> Tensor:
    """Returns the view of ``tensor`` that ``recipe`` describes."""
    for name, args, kwargs in recipe:
        tensor = getattr(Tensor, name)(tensor, *args, **dict(kwargs))
    return tensor


#: Position of the argument, after the first, that makes an activation function write to its input.
_INPLACE_AT = {"relu": 0, "silu": 0, "mish": 0, "leaky_relu": 1, "elu": 1, "dropout": 2}


def writes_in_place(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the caller of an activation function asked for ``inplace``."""
    position = _INPLACE_AT.get(name)
    if position is None:
        return False
    return bool(args[position] if len(args) > position else kwargs.get("inplace"))


def draws(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of a function of :data:`SHIPPED` drops elements."""
    if name != "dropout":
        return False
    given = dict(zip(("p", "training"), args[1:], strict=False)) | dict(kwargs)
    return bool(given.get("training", True)) and given.get("p", 0.5) > 0.0


def is_plain(value: Any) -> bool:
    """Returns whether a value holds no tensor: integers, slices, ``None``, ``...``, nested."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    if isinstance(value, slice):
        return is_plain((value.start, value.stop, value.step))
    return value is None or value is ... or (type(value) in (int, torch.Size))


def is_basic_index(value: Any) -> bool:
    """Returns whether an index gives a view: it has no list, bool or tensor."""
    if isinstance(value, tuple):
        return all(map(is_basic_index, value))
    return not isinstance(value, list | bool) and is_plain(value)


def keeps_type(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool | None:
    """Returns whether ``tensor.to(...)`` returns ``tensor``; None if more than dtype changes."""
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())) or kwargs.get("copy"):
        return None
    device, dtype, _, memory_format = torch._C._nn._parse_to(
        *args, **{key: value for key, value in kwargs.items() if key != "copy"}
    )
    if memory_format is not None or (device is not None and device.type != tensor.device.type):
        return None
    return dtype is None or dtype == tensor.dtype
