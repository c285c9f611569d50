"""Finds and undoes a forward's conversions of and writes to parameters and buffers.

Some routers cast a layer of theirs in each forward (``self.classifier.to(torch.float32)``), some
models write to parameters (averages of weights). In a trace that must leave no effect. A permanent
cast is reported, because all ranks must lay out the parameter accordingly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from smp.modules import packed
from smp.modules.operators import memory_of, written_tensors


class KeptData:
    """The memory, dtype and requires_grad of the parameters and buffers of some modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tensors = {id(t): t for _, t in _tensors_of(modules)}
        # Wrappers of several tensors have no memory of their own, and nothing writes to the parts.
        self._kept = [
            (t, None if packed.is_wrapper(t) else t.data, t.requires_grad) for t in tensors.values()
        ]

    def restore(self) -> None:
        """Undoes ``module.to(dtype)``, ``parameter.data = ...`` and ``requires_grad_``."""
        for tensor, before, requires_grad in self._kept:
            if before is not None and not _is_same_memory(tensor, before):
                tensor.data = before
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


class KeptValues(TorchDispatchMode):
    """Copies parameters before the first operator that writes to their memory.

    Parameters that are parts of one memory (sharded optimizer state) are copied together.

    Args:
        modules: modules of the model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parameters = dict.fromkeys(
            t for _, t in _tensors_of(modules) if isinstance(t, nn.Parameter)
        )
        self._parameters: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.layout == torch.strided and not parameter.is_meta:
                if not packed.is_wrapper(parameter):
                    self._parameters.setdefault(memory_of(parameter), []).append(parameter)
        self._copies: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.on_call(func, tuple(args), kwargs)
        return func(*args, **kwargs)

    def on_call(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Looks at what an operator is about to write; for other modes."""
        for tensor in written_tensors(func, args, kwargs):
            for parameter in self._parameters.pop(memory_of(tensor), ()):
                data = parameter.data
                self._copies[parameter] = data, data.clone()

    def values_before(self) -> dict[nn.Parameter, Tensor]:
        """Returns the values of parameters before operators wrote to their memory."""
        return {parameter: value for parameter, (_, value) in self._copies.items()}

    def restore(self) -> None:
        """Restores the values of parameters that were written."""
        with torch.no_grad():
            for data, value in self._copies.values():
                data.copy_(value)


def dtypes_of(modules: Sequence[nn.Module]) -> dict[tuple[int, str], torch.dtype]:
    """Returns the dtype of each parameter, by module and name."""
    return {
        place: tensor.dtype
        for place, tensor in _tensors_of(modules)
        if isinstance(tensor, nn.Parameter)
    }


def convert_by_exchange(modules: Sequence[nn.Module]) -> None:
    """Makes ``module.to(...)`` replace tensors without memory instead of swapping contents.

    PyTorch would swap contents, which fails while there is a weak reference to a tensor. The
    function is used inside of `smp.partition.trace_guard.untouched`.
    """

    for module in modules:
        module.__dict__["_apply"] = functools.partial(_convert, modules, module)


def _convert(
    modules: Sequence[nn.Module],
    module: nn.Module,
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    """Replaces ``module._apply``."""
    if recurse:
        for child in module.children():
            child._apply(function)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is None:
            continue
        with torch.no_grad():
            made = function(tensor)
        if made is not tensor and isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        _exchange(modules, tensor, made)
    return module


def _exchange(modules: Sequence[nn.Module], tensor: Tensor, made: Tensor) -> None:
    for module in modules:
        for table in (module._parameters, module._buffers):
            for name, other in table.items():
                if other is tensor:
                    table[name] = made  # type: ignore[assignment]


def _tensors_of(modules: Sequence[nn.Module]) -> list[tuple[tuple[int, str], Tensor]]:
    return [
        ((idx, name), tensor)
        for idx, module in enumerate(modules)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _is_same_memory(tensor: Tensor, before: Tensor) -> bool:
    if tensor.dtype != before.dtype or tensor.layout != before.layout:
        return False
    if tensor.layout != torch.strided:
        return True
    same = tensor.untyped_storage()._cdata == before.untyped_storage()._cdata
    return same and tensor.shape == before.shape and tensor.stride() == before.stride()
