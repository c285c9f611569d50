"""Encodes values of optimizers and modules, other than tensors, as JSON and back. Exact."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import smp._C as _C

_MAX_NUMEL = 4096


def encode(value: Any, where: str) -> Any:
    """Encodes numbers, texts, None, lists, tuples, dicts and small tensors as JSON.

    Args:
        value: value of these classes.
        where: name of the value in errors.

    Raises:
        ValueError: the value is of another class; the text names it.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item, where) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(key, where), encode(item, where)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, Tensor) and value.numel() <= _MAX_NUMEL and not value.is_complex():
        return {
            "tensor": encode(value.detach().cpu().tolist(), where),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "on_cpu": value.device.type == "cpu",
        }
    kind = f"a tensor of sizes {list(value.shape)}" if isinstance(value, Tensor) else type(value)
    raise ValueError(
        f"{_C.rank_prefix()}{where} is {kind}, which a checkpoint cannot keep; it keeps numbers, "
        "texts, lists, tuples, dicts and small tensors"
    )


def decode(value: Any, device: torch.device) -> Any:
    """Returns the value that :func:`encode` was given.

    Args:
        value: JSON value.
        device: device of tensors that were not on the CPU.

    Raises:
        ValueError: the value is malformed.
    """
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"float": str(text)}:
            return float(text)
        case {"tuple": list(items)}:
            return tuple(decode(item, device) for item in items)
        case {"dict": list(pairs)}:
            return {decode(key, device): decode(item, device) for key, item in pairs}
        case {"tensor": items, "dtype": str(name), "shape": list(shape), "on_cpu": bool(on_cpu)}:
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"not a dtype of torch: {name!r}")
            tensor = torch.tensor(decode(items, device), dtype=dtype).view(shape)
            return tensor if on_cpu else tensor.to(device)
    raise ValueError(f"not a value of a checkpoint: {value!r}")
