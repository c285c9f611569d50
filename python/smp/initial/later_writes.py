"""Notes values that constructors write to delayed parameters, and writes them again later.

A parameter on the meta device takes no values. Its module's own code runs when it becomes real.
Other writes while it was made (``nn.init.normal_(layer.weight, std=1e-3)`` after
``self.apply(self._init_weights)``) are noted operator by operator and repeated after that. So are
the values it was made of (``nn.Parameter(torch.ones(n))``), unless its memory was never written to
(``torch.empty``). As in `creation_values` the last writer counts: own code undoes earlier writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smp.initial.creation_values import is_in_own_code, modules_made, written_by

_WRITES = "_smp_later_writes"
_MANY = 4096  # storages; from this number on expired ones are removed
_COPIES = ("aten::clone", "aten::_to_copy")
_PAD = "aten::constant_pad_nd"  # transformers pads biases of tied heads, mostly by nothing
_EMPTY = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_UNSET = (*_EMPTY, "aten::empty", "aten::empty_strided")


@dataclass(frozen=True)
class _View:
    """A view of the parameter that is written to."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Number:
    """A tensor full of one number, such as ``weight[0] = 1.0`` makes."""

    size: tuple[int, ...]
    value: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Write:
    """An operator call that writes to a parameter.

    Attributes:
        func: the operator.
        arguments: positional and keyword arguments, with views in place of the parameter; None if
            it reads other delayed tensors, or the parameter's layout differs from the real one's.
    """

    func: OpOverload
    arguments: tuple[Any, Any] | None

    @property
    def name(self) -> str:
        """Returns the operator's name, for messages."""
        return str(self.func._schema.name).removeprefix("aten::")

    def repeat(self, parameter: Tensor) -> None:
        """Repeats the write; ``arguments`` are not None.

        Args:
            parameter: real and contiguous.
        """
        assert self.arguments is not None

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return parameter.detach().as_strided(leaf.size, leaf.stride, leaf.offset)
            if isinstance(leaf, _Number):
                device = parameter.device
                return torch.full(leaf.size, leaf.value, dtype=leaf.dtype, device=device)
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.to(parameter.device)
            return leaf

        args, kwargs = pytree.tree_map(filled, self.arguments)
        self.func(*args, **kwargs)


def writes_of(parameter: Tensor) -> list[Write]:
    """Returns the writes to repeat on a parameter on the meta device, in this order."""
    if _watch.mode is not None:
        _watch.mode.settle()
    found: list[Write] = getattr(parameter, _WRITES, [])
    return found


def forget_writes(root: nn.Module) -> None:
    """Forgets the writes that were noted for the parameters of a model."""
    for parameter in root.parameters():
        parameter.__dict__.pop(_WRITES, None)


def note_value(real: Tensor, delayed: Tensor) -> None:
    """Notes the values of a parameter that leaves its memory for the meta device.

    Args:
        real: tensor with the values; kept if they are not all the same.
        delayed: parameter on the meta device that takes its place.
    """
    if _watch.mode is not None:
        _watch.mode.note_value(real.detach(), delayed)


@contextmanager
def noting_writes() -> Iterator[None]:
    """Notes writes of this thread to meta parameters of modules that are made inside.

    Used inside of `creation_values.noting_draws`. May be nested.
    """
    if _watch.mode is not None:
        yield
        return
    with _Watch() as _watch.mode:
        try:
            yield
        finally:
            _watch.mode.settle()
            _watch.mode = None


@dataclass
class _Record:
    """A storage on the meta device, kept so that its address is not used again, and its writes."""

    storage: torch.UntypedStorage
    writes: list[Write] = field(default_factory=list)
    number: float | None = None  # number that fills the storage


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._records: dict[int, _Record] = {}
        # Real storages without values. The references keep addresses from being used again.
        self._unset: dict[int, StorageWeakRef] = {}

    def note_value(self, real: Tensor, delayed: Tensor) -> None:
        """Implements the function of this name."""
        if is_in_own_code() or real.numel() == 0 or real.layout != torch.strided:
            return
        if real.untyped_storage()._cdata in self._unset:
            return
        whole = _View(tuple(delayed.shape), delayed.stride(), 0)
        first = real.flatten()[0]
        if bool((real == first).all()):
            write = Write(torch.ops.aten.fill_.Scalar, ((whole, first.item()), {}))
        else:
            write = Write(torch.ops.aten.copy_.default, ((whole, real), {}))
        self._note(delayed, write)

    def _note_real(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Notes which real memory has no values."""
        if func._schema.name in _UNSET and not result.is_meta:
            if len(self._unset) >= _MANY:
                self._unset = {k: ref for k, ref in self._unset.items() if not ref.expired()}
            storage = result.untyped_storage()
            self._unset[storage._cdata] = StorageWeakRef(storage)
        for tensor in written_by(func, args, kwargs):
            self._unset.pop(tensor.untyped_storage()._cdata, None)

    def settle(self) -> None:
        """Attaches the writes so far to each parameter.

        They are not kept with its memory, because a cast after the context exchanges that.
        """
        for module in modules_made():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_meta:
                    record = self._records.get(parameter.untyped_storage()._cdata)
                    if record is None:
                        continue
                    writes = list(record.writes)
                    if not _is_whole(parameter):  # its views would differ
                        writes = [Write(write.func, None) for write in writes]
                    setattr(parameter, _WRITES, writes)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        delayed = [t for t in given if t.is_meta]
        if not delayed:
            made = func(*args, **kwargs)
            if func._schema.name == "aten::scalar_tensor" and made.is_meta:
                storage = made.untyped_storage()
                self._records[storage._cdata] = _Record(storage, number=args[0])
            else:
                self._note_real(func, args, kwargs, made)
            return made
        written = {
            tensor.untyped_storage()._cdata: tensor
            for tensor in written_by(func, args, kwargs)
            if tensor.is_meta
        }
        for tensor in written.values():
            self._note(
                tensor, None if is_in_own_code() else self._write(func, args, kwargs, tensor)
            )
        result = func(*args, **kwargs)
        if not written and not is_in_own_code() and func._schema.name not in _EMPTY:
            self._note_made(func, args, delayed, result)
        return result

    def _write(self, func: OpOverload, args: Any, kwargs: Any, written: Tensor) -> Write:
        """Returns the write that repeats an operator's effect on another tensor."""
        storage = written.untyped_storage()._cdata
        is_known = True

        def noted(leaf: Any) -> Any:
            nonlocal is_known
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.untyped_storage()._cdata == storage:
                is_known &= leaf.dtype == written.dtype
                return _View(tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()))
            if not leaf.is_meta:
                return leaf.detach().clone()
            record = self._records.get(leaf.untyped_storage()._cdata)
            if record is None or record.number is None or record.writes:
                is_known = False
                return None
            return _Number(tuple(leaf.shape), record.number, leaf.dtype)

        arguments = pytree.tree_map(noted, (args, dict(kwargs)))
        return Write(func, arguments if is_known else None)

    def _note(self, tensor: Tensor, write: Write | None) -> None:
        """Notes a write to a tensor; None, for its module's own code, undoes earlier ones."""
        storage = tensor.untyped_storage()
        if write is None:
            if (known := self._records.get(storage._cdata)) is not None:
                known.writes.clear()
            return
        self._records.setdefault(storage._cdata, _Record(storage)).writes.append(write)

    def _note_made(
        self, func: OpOverload, args: tuple[Any, ...], delayed: list[Tensor], result: Any
    ) -> None:
        """Notes a computed tensor, which may become a parameter."""
        sources = {tensor.untyped_storage()._cdata for tensor in delayed}
        for made in pytree.tree_leaves(result):
            if not isinstance(made, Tensor) or not made.is_meta:
                continue
            storage = made.untyped_storage()
            if storage._cdata in sources:
                continue  # a view
            writes = [Write(func, None)]
            if _copies(func, args) and _is_whole(delayed[0]):
                record = self._records.get(delayed[0].untyped_storage()._cdata)
                writes = [] if record is None else list(record.writes)
            self._records[storage._cdata] = _Record(storage, writes)


def _copies(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Returns whether the result is a copy of the argument, in memory of its own."""
    return func._schema.name in _COPIES or (func._schema.name == _PAD and not any(args[1]))


class _State(threading.local):
    mode: _Watch | None = None


_watch = _State()


def _is_whole(tensor: Tensor) -> bool:
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and num_bytes == tensor.untyped_storage().nbytes()
