"""Keeps arguments of a step function as bytes for another process of the same script."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

# Objects of the script that the other process has, too.
_OWN = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class _Pickler(pickle.Pickler):
    """Leaves out models and optimizers, and casts floating-point tensors.

    Args:
        dtype: dtype of floating-point tensors; None: they stay as they are.
    """

    def __init__(self, file: io.BytesIO, dtype: torch.dtype | None) -> None:
        super().__init__(file, protocol=4)
        self._dtype = dtype
        self.own: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, _OWN):
            return None
        for number, known in enumerate(self.own):
            if known is obj:
                return number
        self.own.append(obj)
        return len(self.own) - 1

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided:
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        if self._dtype is not None and plain.is_floating_point():
            plain = plain.to(self._dtype)
        # The pickles of torch name a storage by its address, and would never be equal.
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _rebuilt, (content, plain.dtype, tuple(plain.shape))


def _rebuilt(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, own: list[Any]) -> None:
        super().__init__(file)
        self._own = own

    def persistent_load(self, number: Any) -> Any:
        return self._own[number]


class KeptArguments:
    """Arguments of one call, as bytes.

    Args:
        arguments: arguments of the script's call.
        dtype: dtype that floating-point tensors are cast to, or None.

    Attributes:
        data: pickle of all arguments but models and optimizers.

    Raises:
        Exception: something in the arguments cannot be pickled.
    """

    def __init__(self, arguments: Any, dtype: torch.dtype | None = None) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, dtype)
        pickler.dump(arguments)
        self.data = file.getvalue()
        self._own = pickler.own

    def restored(self, data: bytes | None = None) -> Any:
        """Returns new arguments, with the models and optimizers of this process.

        Args:
            data: bytes of another process; its own by default.
        """
        return _Unpickler(io.BytesIO(self.data if data is None else data), self._own).load()
