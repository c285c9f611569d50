"""Formats of Adam's moments that take fewer bytes, and of what 16-bit parameters lack.

The kernels of ``csrc/kernels/compact_state.h`` read and write these formats. Here they are turned
into FP32 and back, for state dicts (docs/design/optimizer_bytes.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smp.modules.state_bytes import BLOCK
from smp.optim.host_moments import zeros_on_host
from smp.tensor_parallel.partial import MASTER

_RESIDUE = "residue"

_MOMENTS = ("exp_avg", "exp_avg_sq")
_TOPS = {"exp_avg": (247.0, 127), "exp_avg_sq": (63487.0, 255)}  # largest value, its code
_SHIFT = 19  # of a float's 23 binary digits 4 stay
_ONE = 0x3F800000  # bits of 1.0

Entry = dict[str, Any]


def new_entry(
    param: Tensor, dtype: torch.dtype, begin: int, has_residue: bool, is_away: bool
) -> Entry:
    """Returns the state of a parameter before its first update, without its step.

    Args:
        param: parameter, or the part of it that this rank updates.
        dtype: dtype of `STATE_DTYPES`.
        begin: number of the part's first element in the parameter.
        has_residue: whether there are further digits of a 16-bit parameter.
        is_away: whether the moments are in host memory.
    """
    entry: Entry = {}
    zeros = zeros_on_host if is_away else _zeros
    for name in _MOMENTS:
        entry[name] = zeros(param, dtype)
        if dtype == torch.uint8:
            num_blocks = _num_blocks(begin, param.numel())
            entry[f"{name}_scale"] = zeros(param.detach().new_empty(num_blocks), torch.float32)
    if has_residue:
        entry[_RESIDUE] = _zeros(param, torch.int8)
    return entry


def widened(entry: Entry, param: Tensor, begin: int) -> Entry:
    """Returns an entry in torch's names and in FP32.

    A residue becomes the parameter's value in FP32 (`MASTER`).
    """
    result = dict(entry)
    for name in _MOMENTS:
        scale = result.pop(f"{name}_scale", None)
        if name in entry:
            value = entry[name]
            result[name] = value.float() if scale is None else _decoded(name, value, scale, begin)
    if _RESIDUE in result:
        result[MASTER] = rejoined(param.detach(), result.pop(_RESIDUE))
    return result


def narrowed(
    entry: Entry, param: Tensor, dtype: torch.dtype, begin: int, has_residue: bool, is_away: bool
) -> Entry:
    """Returns an entry of :func:`widened` in a format; values are rounded to nearest.

    What :func:`widened` has returned for the same part of the same parameter is stored without a
    change.
    """
    result = new_entry(param, dtype, begin, has_residue, is_away)
    for name in _MOMENTS:
        if dtype == torch.uint8:
            codes = result[name]
            _encode(name, _like(codes, entry[name]), codes, result[f"{name}_scale"], begin)
        else:
            result[name].copy_(entry[name])
    exact = entry.get(MASTER)
    if has_residue and exact is not None:
        high, low = split(_like(param, exact))
        # Whoever has written another value to the parameter since means that.
        result[_RESIDUE].copy_(torch.where(high == param.detach(), low, 0))
    rest = {k: v for k, v in entry.items() if k not in result and k != MASTER}
    return {**rest, **result}


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 values, rounded to 24 bits, as nearest bfloat16 ones and residues."""
    bits = (values.view(torch.int32) + 0x80) >> 8
    high = ((bits + 0x80) >> 8).to(torch.int16).view(torch.bfloat16)
    low = (bits & 0xFF).to(torch.uint8).view(torch.int8)
    is_nan = values.isnan()
    return high.masked_fill(is_nan, torch.nan), low.masked_fill(is_nan, 0)


def rejoined(high: Tensor, low: Tensor) -> Tensor:
    """Returns the float32 values that :func:`split` has split."""
    bits = (high.view(torch.int16).to(torch.int32) << 8) + low.to(torch.int32)
    return (bits << 8).view(torch.float32)


def _decoded(name: str, codes: Tensor, scale: Tensor, begin: int) -> Tensor:
    """Returns moments in float32, in the memory order of their codes."""
    top, top_code = _TOPS[name]
    blocks, place = _blocks(_in_order(codes), begin)
    size = (blocks & top_code).to(torch.int32)
    y = ((size << _SHIFT) + _ONE).view(torch.float32) - 1.0
    x = y * torch.tensor(1 / top) * scale.unsqueeze(1)
    if name == "exp_avg":
        x = torch.where(blocks > top_code, -x, x)
    result = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    _in_order(result).copy_(x.view(-1)[place])
    return result


def _encode(name: str, values: Tensor, codes: Tensor, scale: Tensor, begin: int) -> None:
    """Writes codes and scales of moments, in the memory order of both tensors."""
    if not values.numel():
        return
    top, top_code = _TOPS[name]
    blocks, place = _blocks(_in_order(values), begin)
    scale.copy_(blocks.abs().amax(1))
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(1)
    bits = (1.0 + blocks.abs() / divisor * top).view(torch.int32) - _ONE
    size = ((bits + (1 << (_SHIFT - 1))) >> _SHIFT).clamp(0, top_code)
    if name == "exp_avg":
        size = size | (torch.signbit(blocks).to(torch.int32) << 7)
    else:
        size = torch.where(blocks == 0, size, size.clamp(min=1))
    _in_order(codes).copy_(size.view(-1)[place])


def _blocks(flat: Tensor, begin: int) -> tuple[Tensor, slice]:
    """Returns elements as rows of blocks, padded with zeros, and their place in these rows."""
    offset = begin % BLOCK
    padded = flat.new_zeros(_num_blocks(begin, flat.numel()) * BLOCK)
    place = slice(offset, offset + flat.numel())
    padded[place] = flat
    return padded.view(-1, BLOCK), place


def _num_blocks(begin: int, numel: int) -> int:
    return -(-(begin % BLOCK + numel) // BLOCK)


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(param.detach(), dtype=dtype, memory_format=torch.preserve_format)


def _like(like: Tensor, value: Tensor) -> Tensor:
    """Returns float32 values on the device and in the memory order of another tensor."""
    result = torch.empty_like(
        like.detach(), dtype=torch.float32, memory_format=torch.preserve_format
    )
    return result.copy_(value)


def _in_order(dense: Tensor) -> Tensor:
    """Returns the elements of a tensor in the order in which they lie in memory."""
    return dense.as_strided((dense.numel(),), (1,))
