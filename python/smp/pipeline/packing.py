"""Packs nested arguments and results as bytes plus tensors, to travel between ranks."""

from __future__ import annotations

import io
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import smp._C as _C
from smp.modules.flat import is_cache
from smp.pipeline import caches, functions
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


def _cache_at(index: int, empty: bytes) -> Any:
    cache = _unpacking.caches.get(index)
    if cache is None:
        cache = _unpacking.caches[index] = pickle.loads(empty)
    caches.remember(index, cache)
    return cache


class _Packer(pickle.Pickler):
    """A pickler that takes tensors, modules of the model and the own device out of the pickle.

    ``reducer_override`` is called only for objects that pickle has no built-in way for, so plain
    containers and numbers stay at C speed. A tensor that occurs twice is taken out once, because
    pickle remembers objects by identity.
    """

    def __init__(self, codec: Codec, buffer: io.BytesIO, arguments: Sequence[Tensor]) -> None:
        super().__init__(buffer, protocol=5)
        self._codec = codec
        self._arguments = {id(tensor): i for i, tensor in enumerate(arguments)}
        self.tensors: list[Tensor] = []
        self.caches: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            if type(obj) is RemoteTensor and obj._whole is not None:
                if obj.is_untouched():  # the receiver makes the view again
                    return functions.apply, (obj.steps(), obj._whole)
                obj = localize(obj)
            elif type(obj) is FakeTensor:
                raise ValueError(
                    f"{_C.rank_prefix()}an argument or result of a module on another rank is a "
                    f"tensor of shape {tuple(obj.shape)} without data, which the model has kept "
                    "since its trace; do not keep values that are created while smp.is_tracing() "
                    "is True, or set skip_tracing"
                )
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
        elif is_cache(obj):
            self.caches.append(obj)
            return self.reduce_cache(obj)
        return NotImplemented

    def reduce_cache(self, cache: Any) -> Any:
        """Reduces an argument: the receiver has a cache of its own under the same number."""
        index = caches.number(cache)
        return _cache_at, (index, self._codec.empty_cache(cache))


class _ResultPacker(_Packer):
    def reduce_cache(self, cache: Any) -> Any:
        """Reduces a result: the caller's own cache if it came from there, else an empty one."""
        index = caches.number_of(cache)
        if index is not None:
            return caches.numbered, (index,)
        return pickle.loads, (self._codec.empty_cache(cache),)


class _EmptyCachePacker(_Packer):
    def reducer_override(self, obj: Any) -> Any:
        return super().reducer_override(obj) if isinstance(obj, torch.device) else NotImplemented


class Codec:
    """Packs and unpacks for one model.

    Args:
        modules: all modules of the model; a module inside arguments travels as its index here.
        device: device of this rank; a device of the same type becomes the receiver's own.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.modules = modules
        self.module_ids = {module: i for i, module in enumerate(modules)}
        self.device = device
        self._empty_caches: dict[int, tuple[Any, bytes]] = {}

    def pack(self, value: Any) -> tuple[bytes, list[Tensor], list[Any]]:
        """Splits arguments of a call into a byte string and the tensors in it, each once.

        Returns:
            bytes, tensors, and the attention caches among the arguments.

        Raises:
            ValueError: something in ``value`` cannot be pickled.
        """
        packer, data = self._dump(_Packer, value, ())
        return data, packer.tensors, packer.caches

    def pack_result(
        self, value: Any, arguments: Sequence[Tensor] = ()
    ) -> tuple[bytes, list[Tensor]]:
        """Splits a result into a byte string and the tensors in it.

        Args:
            value: any value that pickle takes, with tensors anywhere.
            arguments: tensors that the receiver has already; they are sent as their index.
        """
        packer, data = self._dump(_ResultPacker, value, arguments)
        return data, packer.tensors

    def empty_cache(self, cache: Any) -> bytes:
        """Returns an attention cache without contents, pickled; made once per cache."""
        made = self._empty_caches.get(id(cache))
        if made is None or made[0]() is not cache:
            config = getattr(self.modules[0], "config", None) if self.modules else None
            _, data = self._dump(_EmptyCachePacker, caches.emptied(cache, config), ())
            made = (weakref.ref(cache), data)
            if len(self._empty_caches) > 64:
                self._empty_caches.clear()
            self._empty_caches[id(cache)] = made
        return made[1]

    def _dump(
        self, kind: type[_Packer], value: Any, arguments: Sequence[Tensor]
    ) -> tuple[_Packer, bytes]:
        buffer = io.BytesIO()
        packer = kind(self, buffer, arguments)
        try:
            packer.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"an argument or result of a module on another rank cannot be sent: {error}; pass "
                "tensors, numbers, strings, containers or objects that pickle takes"
            ) from error
        return packer, buffer.getvalue()

    def unpack(
        self,
        data: bytes,
        tensors: Sequence[Tensor],
        arguments: Sequence[Tensor] = (),
        own_caches: dict[int, Any] | None = None,
    ) -> Any:
        """Restores a value of :meth:`pack` or :meth:`pack_result`.

        Args:
            own_caches: attention caches of this rank by number; new ones are added.
        """
        _unpacking.tensors = tensors
        _unpacking.arguments = arguments
        _unpacking.modules = self.modules
        _unpacking.device = self.device
        _unpacking.caches = {} if own_caches is None else own_caches
        try:
            return pickle.loads(data)
        finally:
            _unpacking.__dict__.clear()
