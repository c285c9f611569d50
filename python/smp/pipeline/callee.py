"""Checks that a caller may run ahead of a module on another rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import smp._C as _C
from smp.modules.argument_containers import ContainerRef, ItemRef
from smp.pipeline.remote_tensor import RemoteTensor

_aten = torch.ops.aten


class Watched:
    """The tensors of a call that share memory at the callee but not here.

    Args:
        name: name of the module.
        tensors: arguments and results.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._name = name
        self._tensors = [(tensor, _version(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Raises when one of them was changed in place, since the others have not changed."""
        for tensor, version in self._tensors:
            if _version(tensor) != version:
                raise RuntimeError(
                    f"{_C.rank_prefix()}module '{self._name}' on another rank returned a view of "
                    "its argument, or results that share memory, and one of them was changed in "
                    "place; the others cannot follow. Let the module return a copy (.clone()), "
                    "change a copy, or put both on one partition"
                )


def _version(tensor: Tensor) -> int:
    if isinstance(tensor, RemoteTensor):
        return 0 if tensor.is_untouched() else 1
    return 0 if tensor.is_inference() else tensor._version


class ValueWatch(TorchDispatchMode):
    """Notices whether code reads values of tensors, on which its result may then depend.

    For arguments that look the same, such a module may return other shapes or ``None`` next time,
    so its caller has to wait for it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not self.seen:
            self.seen = _reads_values(func, args)
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any, args: Sequence[Any]) -> bool:
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
        return func is _aten.index.Tensor and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        )
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def is_certain(result: Any) -> bool:
    """Returns whether the structure of a result determines everything but the data of tensors.

    Results that hold only tensors and objects of the caller are certain. A number is not: it may
    differ next time, although the arguments look the same.
    """
    if result is None or isinstance(result, Tensor | ContainerRef | ItemRef):
        return True
    if isinstance(result, dict):
        return all(isinstance(key, str) for key in result) and all(map(is_certain, result.values()))
    if isinstance(result, tuple | list):
        return all(map(is_certain, result))
    return False
