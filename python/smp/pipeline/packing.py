"""Nested arguments and results as bytes plus tensors, ready to travel between ranks."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp.pipeline import functions
from smp.pipeline.remote_tensor import RemoteTensor, localize

_unpacking = threading.local()


def _tensor_at(index: int) -> Tensor:
    return _unpacking.tensors[index]  # type: ignore[no-any-return]


def _argument_at(index: int) -> Tensor:
    return _unpacking.arguments[index]  # type: ignore[no-any-return]


def _module_at(module_id: int) -> nn.Module:
    return _unpacking.modules[module_id]  # type: ignore[no-any-return]


def _own_device() -> torch.device:
    return _unpacking.device  # type: ignore[no-any-return]


class _Packer(pickle.Pickler):
    """Takes tensors, modules of the model and the own device out of the pickle.

    ``reducer_override`` is asked only for objects that pickle has no built-in way for, so plain
    containers and numbers stay at C speed. A tensor that occurs twice is taken out once, because
    pickle remembers objects by identity.
    """

    def __init__(self, codec: Codec, buffer: io.BytesIO, arguments: Sequence[Tensor]) -> None:
        super().__init__(buffer, protocol=5)
        self._codec = codec
        self._arguments = {id(tensor): i for i, tensor in enumerate(arguments)}
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            if type(obj) is RemoteTensor and obj._whole is not None:
                if obj.is_untouched():  # a view is made again where it is needed
                    return functions.apply, (obj._recipe, obj._whole)
                obj = localize(obj)
            argument = self._arguments.get(id(obj))
            if argument is not None:
                return _argument_at, (argument,)
            self.tensors.append(obj)
            return _tensor_at, (len(self.tensors) - 1,)
        if isinstance(obj, nn.Module):
            module_id = self._codec.module_ids.get(obj)
            if module_id is not None:
                return _module_at, (module_id,)
        elif isinstance(obj, torch.device):
            if obj.type == self._codec.device.type:
                return _own_device, ()
        elif _is_attention_cache(obj):
            raise ValueError(
                f"a {type(obj).__name__} is an argument or a result of a module on another "
                "pipeline rank; attention caches cannot be shared between ranks: set "
                "use_cache=False in the model's configuration or in its call"
            )
        return NotImplemented


class Codec:
    """Packs and unpacks for one model.

    Args:
        modules: all modules of the model; a module inside arguments travels as its index here.
        device: this rank's device; a device of the same type becomes the receiver's own.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.modules = modules
        self.module_ids = {module: i for i, module in enumerate(modules)}
        self.device = device

    def pack(self, value: Any, arguments: Sequence[Tensor] = ()) -> tuple[bytes, list[Tensor]]:
        """Splits ``value`` into a byte string and the tensors in it, each once.

        Args:
            value: anything that pickle takes, with tensors anywhere.
            arguments: tensors that the receiver has already; they are sent as their index.

        Raises:
            ValueError: if something in ``value`` cannot be pickled.
        """
        buffer = io.BytesIO()
        packer = _Packer(self, buffer, arguments)
        try:
            packer.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"an argument or result of a module on another rank cannot travel: {error}; "
                "pass tensors, numbers, strings, containers or objects that pickle takes"
            ) from error
        return buffer.getvalue(), packer.tensors

    def unpack(
        self, data: bytes, tensors: Sequence[Tensor], arguments: Sequence[Tensor] = ()
    ) -> Any:
        """Inverse of :meth:`pack`."""
        _unpacking.tensors = tensors
        _unpacking.arguments = arguments
        _unpacking.modules = self.modules
        _unpacking.device = self.device
        try:
            return pickle.loads(data)
        finally:
            _unpacking.__dict__.clear()


def is_certain(result: Any) -> bool:
    """Whether a result holds nothing but tensors, so that its structure tells all but the data.

    A number that a module returns may be another one next time, although its arguments look the
    same; the caller must wait for it.
    """
    if result is None or isinstance(result, Tensor):
        return True
    if isinstance(result, dict):
        return all(isinstance(key, str) for key in result) and all(map(is_certain, result.values()))
    if isinstance(result, tuple | list):
        return all(map(is_certain, result))
    return False


def _is_attention_cache(obj: Any) -> bool:
    # By name, because importing transformers here is not allowed.
    return any(
        cls.__name__ == "Cache" and cls.__module__ == "transformers.cache_utils"
        for cls in type(obj).__mro__
    )
