"""Estimates the cost of one operator by shapes: FLOPs by formula, else memory traffic.

Costs are in FLOPs. Operators that only move memory (element-wise, normalisation, copies) count the
FLOPs that the device could have done meanwhile, so that they are not free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from smp._torch_releases import operators

aten = torch.ops.aten

# FLOPs that fit into the time of moving one byte through memory, per device type. CPU: one core of
# about 60 GFLOP/s in fp32 beside about 10 GB/s. CUDA: about 400 TFLOP/s beside about 4 TB/s.
_FLOPS_PER_BYTE = {"cpu": 6.0, "cuda": 100.0}
# The same for one byte that is sent to another rank, through shared memory (one write and one read
# each) or NVLink.
_FLOPS_PER_LINK_BYTE = {"cpu": 20.0, "cuda": 2000.0}

# These read rows of a table that may be far larger than what is read.
_LOOKUPS = {aten.embedding, aten.index_select, aten.index, aten.gather, aten.take}


class Rule(Enum):
    """The ranks that compute an operator in the code of a module that is split over ranks."""

    HERE = "here"  # the rank of the code, to which the data are sent
    VIEW = "view"  # no rank: it travels with the data
    ALL = "all"  # the rank that has the data, if no operand is of the rank of the code
    SCALE = "scale"  # the same, and the second operand may be a number
    NUMBER = "number"  # the same, and the second operand must be a number
    FIRST = "first"  # the rank of the first operand; the others are sent there


# Operators that the engine leaves to the rank that has the data, by the functions of
# smp/pipeline/functions.py that lead to them. Others that are no view are computed HERE.
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.add, aten.add_, aten.sub, aten.sub_, aten.neg), Rule.ALL),
    **dict.fromkeys((aten.mul, aten.mul_), Rule.SCALE),
    **dict.fromkeys((aten.div, aten.div_), Rule.NUMBER),
    **dict.fromkeys(
        (
            *(aten.relu, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten._softmax),
            *(aten.leaky_relu, aten.elu, aten.mish, aten.softplus),
            # Dropout, with and without a kernel of its own.
            *(aten.native_dropout, aten.empty_like, aten.bernoulli, aten.bernoulli_),
            *(aten._log_softmax, aten.sum, aten.mean, aten.clone, aten._to_copy),
        ),
        Rule.FIRST,
    ),
}

# Functions that the engine leaves as a whole to the rank of their first argument, whichever
# operators they lead to.
LOSSES = frozenset(
    {
        *(functional.cross_entropy, functional.nll_loss, functional.mse_loss, functional.l1_loss),
        *(functional.smooth_l1_loss, functional.kl_div, functional.binary_cross_entropy),
        functional.binary_cross_entropy_with_logits,
    }
)

# Autograd and the tracer itself cause these; they read nothing.
_IGNORED = {aten.detach, aten.alias, aten.lift_fresh, aten.is_same_size}


def flops_per_byte(device_type: str) -> float:
    """Returns the FLOPs that take as long as moving one byte through memory."""
    return _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])


def flops_per_link_byte(device_type: str) -> float:
    """Returns the FLOPs that take as long as moving one byte to another rank."""
    return _FLOPS_PER_LINK_BYTE.get(device_type, _FLOPS_PER_LINK_BYTE["cuda"])


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def is_ignored(func: OpOverload) -> bool:
    """Returns whether an operator neither computes nor reads."""
    # Fake tensors ask for their device with an operator.
    return func.namespace == "prim" or func._overloadpacket in _IGNORED


def is_view(func: OpOverload) -> bool:
    """Returns whether the result is the argument in another shape."""
    # _unsafe_view is the second half of a reshape; its argument is not used again.
    return func.is_view or func._overloadpacket is aten._unsafe_view


def rule_of(func: OpOverload, args: Sequence[Any], inputs: Sequence[Tensor]) -> Rule:
    """Returns which ranks compute this call, in the code of a module that is split.

    Args:
        func, args: the operator and its arguments.
        inputs: the tensors among them.
    """
    if is_view(func):
        return Rule.VIEW
    rule = _RULES.get(func._overloadpacket, Rule.HERE)
    if rule in (Rule.HERE, Rule.FIRST):
        return rule
    if not inputs:  # the arguments are numbers only
        return Rule.HERE
    has_number = len(args) > 1 and not isinstance(args[1], Tensor)
    if (rule is Rule.ALL and has_number) or (rule is Rule.NUMBER and not has_number):
        return Rule.HERE
    first = inputs[0]
    same = all(t.shape == first.shape and t.dtype == first.dtype for t in inputs[1:])
    return Rule.ALL if same and first.is_floating_point() else Rule.HERE


def _attention(query: Sequence[int], value: Sequence[int], key: Sequence[int]) -> int:
    rows = math.prod(query[:-1])
    return 2 * rows * key[-2] * (query[-1] + value[-1])


def _flash_attention_for_cpu(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return _attention(q.shape, v.shape, k.shape)


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _mkldnn_rnn_layer(x: Tensor, w0: Tensor, w1: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() // x.shape[-1] * (w0.numel() + w1.numel())


def _cudnn_rnn(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return 2 * x.numel() // x.shape[-1] * sum(w.numel() for w in weights)


def _matrix_vector(a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _gemm_4bit(a: Tensor, _: Tensor, shape: Sequence[int], *__: Any, **___: Any) -> int:
    return 2 * a.numel() * shape[0]


def _int8_scaled_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[0]


def _int8_mixed_scaled_mm(a: Tensor, _: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    return 2 * a.numel() * b.shape[0]


# Products of bitsandbytes, which registers its operators when it is imported.
_OF_BITSANDBYTES: dict[str, Callable[..., int]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_scaled_mm": _int8_scaled_mm,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
}
_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _flash_attention_for_cpu,
    aten.mkldnn_rnn_layer: _mkldnn_rnn_layer,
    aten._cudnn_rnn: _cudnn_rnn,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    **dict.fromkeys(operators("_grouped_mm"), _grouped_mm),
}
# The backward of these recomputes the scores: five products instead of two.
_ATTENTION = {packet for packet in flop_registry if "attention" in str(packet)} | {
    aten._scaled_dot_product_flash_attention_for_cpu
}
_ATTENTION_BACKWARD = 2.5


def _formula(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    packet = func._overloadpacket
    own = _OWN_FORMULAS.get(packet) or _OF_BITSANDBYTES.get(func._schema.name)
    if own is not None:
        return float(own(*args, **kwargs))
    known = flop_registry.get(packet)
    return 0.0 if known is None else float(known(*args, **kwargs, out_val=out))


def operator_cost(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    needs_grad: Sequence[Tensor],
    flops_per_byte: float,
) -> tuple[float, float]:
    """Returns the costs of an operator's forward and of its backward, in FLOPs.

    Args:
        func, args, kwargs, out: the call and its result.
        inputs, outputs: the tensors in them.
        needs_grad: inputs that a backward gives gradients to.
        flops_per_byte: FLOPs that the device does in the time of moving one byte.
    """
    if is_view(func) or is_ignored(func):
        return 0.0, 0.0
    packet = func._overloadpacket
    written = sum(num_bytes(t) for t in outputs)
    read = written if packet in _LOOKUPS else sum(num_bytes(t) for t in inputs)
    traffic = (read + written) * flops_per_byte
    flops = _formula(func, args, kwargs, out)
    if flops == 0.0:
        return traffic, 2.0 * traffic if needs_grad else 0.0
    if not needs_grad:
        backward = 0.0
    elif packet in _ATTENTION:
        backward = _ATTENTION_BACKWARD * flops
    else:
        # Each factor has one product of the same size; a bias has none.
        backward = flops * min(2, sum(t.dim() > 1 for t in needs_grad))
    return max(flops, traffic), backward and max(backward, traffic)
