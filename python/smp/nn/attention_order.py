"""The order in which PyTorch tries the backends of its fused attention, by shapes and device.

PyTorch has one order for all shapes, but no backend is the fastest for all of them: the work of a
head of 256 elements does not fit into the registers of kernels that are made for 64 or 128. So a
table, which `make gpu PART=attention-order` measures, has an order for each kind of call. Where it
has no row, PyTorch's order stays.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

#: Backends by the names of the table.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
MASKS = ("none", "causal", "tensor")
_FILE = "attention_orders.json"
_KEYS = {"device": str, "dtype": str, "head_size": int, "mask": str, "least_keys": int}


@dataclass(frozen=True)
class OrderRow:
    """An order of backends for one kind of call.

    Attributes:
        device: kind of the device, as of `device_kind`.
        dtype: dtype of queries, as in "bfloat16".
        head_size: elements of a head.
        mask: "none", "causal" or "tensor".
        least_keys: smallest number of keys for which the order holds.
        order: names of backends, the fastest first; those that refuse such calls are left out.
    """

    device: str
    dtype: str
    head_size: int
    mask: str
    least_keys: int
    order: tuple[str, ...]


def order_for(
    rows: Sequence[OrderRow], device: str, dtype: str, head_size: int, mask: str, num_keys: int
) -> tuple[str, ...]:
    """Returns the order of the row with the most keys that a call reaches; without one, no names.

    Args:
        rows: the table.
        device, dtype, head_size, mask: the same as in `OrderRow`; other values than those of a row
            have no order, because the limits of kernels are not known in between.
        num_keys: keys of the call.
    """
    most = 0
    order: tuple[str, ...] = ()
    for row in rows:
        is_alike = (row.device, row.dtype, row.mask) == (device, dtype, mask)
        if is_alike and row.head_size == head_size and most < row.least_keys <= num_keys:
            most, order = row.least_keys, row.order
    return order


def ordered(order: Sequence[str], enabled: Sequence[str]) -> list[str]:
    """Returns the enabled backends: those of an order first, behind them the others."""
    first = [name for name in order if name in enabled]
    return first + [name for name in enabled if name not in first]


def read_rows(text: str, where: str) -> tuple[OrderRow, ...]:
    """Parses a table.

    Args:
        text: JSON with "source" and "rows".
        where: file, for messages.

    Raises:
        ValueError: the text is no table; the message names the row and the mistake.
    """
    table = json.loads(text)
    rows = table.get("rows") if isinstance(table, dict) else None
    if not isinstance(rows, list):
        raise ValueError(f'{where}: expected an object with "rows", a list')
    return tuple(_row(values, f"{where}, row {number}") for number, values in enumerate(rows))


def _row(values: Any, where: str) -> OrderRow:
    for key, kind in _KEYS.items():
        if not isinstance(values, dict) or type(values.get(key)) is not kind:
            raise ValueError(f"{where}: expected {key!r}, of type {kind.__name__}, got {values}")
    order, mask = values.get("order"), values["mask"]
    if mask not in MASKS:
        raise ValueError(f"{where}: mask: expected one of {', '.join(MASKS)}, got {mask!r}")
    if not isinstance(order, list) or not order or not set(order) <= BACKENDS.keys():
        raise ValueError(f"{where}: order: expected some of {', '.join(BACKENDS)}, got {order}")
    if values["least_keys"] < 1 or len(set(order)) != len(order):
        raise ValueError(f"{where}: expected least_keys >= 1 and each backend once, got {values}")
    return OrderRow(**{key: values[key] for key in _KEYS}, order=tuple(order))


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _constant(function: _Function) -> _Function:
    """Makes compiled code keep the result that a function had when the code was compiled."""
    marked: _Function = torch.compiler.assume_constant_result(function)
    return marked


@functools.cache
def _shipped() -> tuple[OrderRow, ...]:
    return read_rows(resources.files("smp.nn").joinpath(_FILE).read_text(), _FILE)


@_constant
def table() -> tuple[OrderRow, ...]:
    """Returns the table of the package, read once."""
    return _shipped()


@_constant
def device_kind(device: torch.device) -> str:
    """Returns the device as rows name it: "cpu", or "cuda 9.0" with the compute capability."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {major}.{minor}"


@_constant
def enabled_backends() -> tuple[str, ...]:
    """Returns the backends that scripts have left enabled."""
    is_enabled = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return tuple(name for name, is_on in is_enabled.items() if is_on)


def preferring(
    query: Tensor, num_keys: int, mask: Tensor | None, causal: bool
) -> AbstractContextManager[Any]:
    """Returns a context in which PyTorch tries backends in the order of the table.

    Backends that a script has disabled stay so. Without a row for the call nothing changes.

    Args:
        query: ``[B, heads, Q, D]``.
        num_keys: number of keys.
        mask: mask of the call.
        causal: whether the call is causal without a mask.
    """
    rows = table()
    if not rows:
        return contextlib.nullcontext()
    kind = "tensor" if mask is not None else "causal" if causal else "none"
    dtype = str(query.dtype).removeprefix("torch.")
    order = order_for(rows, device_kind(query.device), dtype, query.shape[-1], kind, num_keys)
    if not order:
        return contextlib.nullcontext()
    names = ordered(order, enabled_backends())
    return sdpa_kernel([BACKENDS[name] for name in names], True)
