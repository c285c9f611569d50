"""Moves parameters to a device, or frees their memory. No other module does this.

All functions keep the ``Parameter`` object, so optimizers that were made before the model was
wrapped continue with the same parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from smp.modules import packed


def make_real(parameter: nn.Parameter, device: torch.device) -> None:
    """Moves a parameter of this rank to ``device``; shape, dtype and object stay.

    Raises:
        ValueError: the parameter is on the meta device, and has no values to move.
    """
    if parameter.is_meta:
        raise ValueError(
            "a parameter is on the meta device and has no values; its model initialises it when "
            "it is partitioned"
        )
    with torch.no_grad():
        if packed.is_packed(parameter):
            if any(part.device != device for part in packed.parts_of(parameter).values()):
                packed.put(parameter, packed.mapped(parameter, lambda _, part: part.to(device)))
        elif packed.waits_for_device(parameter):
            parameter.to(device)
        elif parameter.device != device:
            parameter.data = parameter.data.to(device)
        elif not parameter.data.is_contiguous():
            parameter.data = parameter.data.contiguous()


_ABSENCE = "_smp_absence"


def make_placeholder(parameter: nn.Parameter, device: torch.device, why: str) -> None:
    """Frees the memory of a parameter that lives on another rank.

    Shape, dtype and device remain true. Reading the values, in Python or in an operator, raises.

    Args:
        parameter: the parameter, whose object is kept.
        device: device of the placeholder.
        why: text of that error.
    """

    def empty(part: Tensor) -> Tensor:
        return _placeholder(part.dtype, device, part.shape, why)

    def kept(name: str, part: Tensor) -> Tensor:
        if not packed.is_table(name):
            return empty(part)
        return torch.zeros_like(part, device=device) if part.is_meta else part.to(device)

    with torch.no_grad():
        parameter.grad = None
        setattr(parameter, _ABSENCE, why)
        if packed.is_packed(parameter):
            packed.put(parameter, packed.mapped(parameter, kept))
        elif parameter.is_meta:
            exchange(parameter, empty(parameter))
        else:
            parameter.data = empty(parameter)


def _placeholder(dtype: torch.dtype, device: torch.device, shape: torch.Size, why: str) -> Tensor:
    value = filler(dtype, device).expand(shape)
    if value.numel():  # an empty tensor has nothing to read
        torch._C._set_storage_data_ptr_access_error_msg(value.untyped_storage()._cdata, why)
    return value


def is_placeholder(tensor: Tensor) -> bool:
    """Returns whether a tensor has no values on this rank."""
    if packed.is_packed(tensor):
        tensor = next(iter(packed.parts_of(tensor).values()))
    if tensor.numel() == 0 or tensor.is_meta or (tensor.numel() > 1 and any(tensor.stride())):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def memory_span(tensor: Tensor) -> tuple[int, int] | None:
    """Returns the addresses of a tensor's first byte and of the byte behind its last one.

    None for a tensor without memory on this rank: on the meta device, lazy, empty, not strided, or
    a placeholder.
    """
    if tensor.is_meta or is_lazy(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return None
    if is_placeholder(tensor):
        return None
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def plain_state(root: nn.Module) -> dict[str, Any]:
    """Returns ``root.state_dict()`` including placeholders, which scripts cannot get."""
    state = root.state_dict(keep_vars=True)
    return {key: packed.detached(v) if isinstance(v, Tensor) else v for key, v in state.items()}


def cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Changes the dtype of a parameter; placeholders stay without memory.

    Args:
        parameter: the parameter, whose object is kept. Its gradient is dropped.
        dtype: floating-point dtype.
    """
    if parameter.dtype == dtype or packed.is_packed(parameter):
        return  # layers with packed weights cast what they unpack
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if is_placeholder(parameter):
            why = getattr(parameter, _ABSENCE)
            parameter.data = _placeholder(dtype, parameter.device, parameter.shape, why)
        else:
            parameter.data = parameter.data.to(dtype)
        parameter.grad = None


def fill(parameter: nn.Parameter, value: Tensor) -> None:
    """Copies ``value`` into a parameter, which may be on the meta device.

    Args:
        parameter: the parameter; keeps its dtype, and its device unless that is meta.
        value: tensor of the same shape.
    """
    if parameter.is_meta:
        exchange(parameter, value.detach().to(parameter.dtype, copy=True).contiguous())
    else:
        with torch.no_grad():
            parameter.copy_(value)


def filler(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns one element that no initialisation writes: NaN, or the smallest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        value: float | int | bool = float("nan")
    else:
        value = False if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)


def has_filler(tensor: Tensor) -> bool:
    """Returns whether a tensor contains an element of :func:`filler`."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return bool((tensor == filler(tensor.dtype, tensor.device)).any())
    # A single NaN makes the sum NaN, which is much cheaper than looking at each element.
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def exchange(parameter: nn.Parameter, value: Tensor) -> None:
    """Puts a tensor of another device type into a parameter, for which ``.data =`` fails."""
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)  # swap_tensors swaps attributes, which have to stay
    torch.utils.swap_tensors(parameter, other)
