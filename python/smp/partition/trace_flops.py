"""What one operator costs, from shapes alone: FLOPs where a formula is known, else memory traffic.

Costs are in FLOPs. Operators that only move memory (element-wise, normalisation, copies) count the
FLOPs that the device could have done meanwhile, so that they are not free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# FLOPs that fit into the time of moving one byte through memory, per device type. CPU: one core of
# about 60 GFLOP/s in fp32 beside about 10 GB/s. CUDA: about 400 TFLOP/s beside about 4 TB/s.
_FLOPS_PER_BYTE = {"cpu": 6.0, "cuda": 100.0}
# The same for one byte that crosses to another rank: shared memory (written and read once each) or
# NVLink.
_FLOPS_PER_LINK_BYTE = {"cpu": 20.0, "cuda": 2000.0}

# Reads rows of a table that may be far larger than what is read.
_LOOKUPS = {aten.embedding, aten.index_select, aten.index, aten.gather, aten.take}

# Sums and scalings. The engine computes them where the data are, see docs/design/pipeline.md.
_ARITHMETIC = {aten.add, aten.add_, aten.sub, aten.sub_, aten.neg}
_SCALING = {aten.mul, aten.mul_, aten.div, aten.div_}

# Autograd and the tracer itself cause these; they read nothing.
_IGNORED = {aten.detach, aten.alias, aten.lift_fresh, aten.is_same_size}


def flops_per_byte(device_type: str) -> float:
    """FLOPs that take as long as moving one byte through memory."""
    return _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])


def flops_per_link_byte(device_type: str) -> float:
    """FLOPs that take as long as moving one byte to another rank."""
    return _FLOPS_PER_LINK_BYTE.get(device_type, _FLOPS_PER_LINK_BYTE["cuda"])


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def is_ignored(func: OpOverload) -> bool:
    """Whether an operator neither computes nor reads."""
    # Fake tensors ask for their device with an operator.
    return func.namespace == "prim" or func._overloadpacket in _IGNORED


def stays_remote(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the engine computes this on handles, where the data are.

    Sums and differences of tensors, and products with numbers.
    """
    packet = func._overloadpacket
    if packet in _ARITHMETIC:
        return True
    return packet in _SCALING and len(args) > 1 and not isinstance(args[1], Tensor)


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


_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _flash_attention_for_cpu,
    aten._grouped_mm: _grouped_mm,
    aten.mkldnn_rnn_layer: _mkldnn_rnn_layer,
    aten._cudnn_rnn: _cudnn_rnn,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
}
# Their backward recomputes the scores: five products instead of two.
_ATTENTION = {packet for packet in flop_registry if "attention" in str(packet)} | {
    aten._scaled_dot_product_flash_attention_for_cpu
}
_ATTENTION_BACKWARD = 2.5


def _formula(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    packet = func._overloadpacket
    own = _OWN_FORMULAS.get(packet)
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
    flops_per_byte: float,
) -> tuple[float, float]:
    """Forward cost of one operator, and that of its backward, in FLOPs.

    Args:
        func, args, kwargs, out: the call and its result.
        inputs, outputs: the tensors in them.
        flops_per_byte: of the device.
    """
    if func.is_view or is_ignored(func):
        return 0.0, 0.0
    inputs = list(inputs)
    needs_grad = [t for t in inputs if t.requires_grad] if torch.is_grad_enabled() else []
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
        # One product of the same size for each factor; a bias is none.
        backward = flops * min(2, sum(t.dim() > 1 for t in needs_grad))
    return max(flops, traffic), backward and max(backward, traffic)
