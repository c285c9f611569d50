"""Notes which code was the last to write to a parameter while its model was made.

Values that ``reset_parameters`` of a module, or ``_init_weights`` of the Hugging Face model around
it, wrote last can be drawn later, on other random numbers. Values of other writers (a checkpoint, a
constructor, the user) have to stay. Operators on storages tell the last writer.

- A real parameter whose module's own code came last gets a checksum. A write after the context
  changes it; version counters would miss writes to ``.data``.
- A parameter on the meta device takes no values. Writes after its module's own code
  (``nn.init.normal_(layer.weight, std=1e-3)`` after ``self.apply(self._init_weights)``) are noted
  operator by operator. So are the values it was made of (``nn.Parameter(torch.ones(n))``), unless
  its memory was never written to (``torch.empty``).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smp.initial.later_writes import Write, write_of_call, write_of_value
from smp.modules.creation import MethodWrappers
from smp.modules.operators import written_tensors

_CHECKSUM = "_smp_drawn_checksum"
_WRITES = "_smp_later_writes"
_Checksum = tuple[torch.Size, torch.dtype, int, int]

#: methods that initialise the module that has them
RESETS = ("reset_parameters", "_reset_parameters")
#: method that initialises the module that it is given
INITIALISER = "_init_weights"

_MANY = 4096  # storages; from this number on expired ones are removed
_COPIES = ("aten::clone", "aten::_to_copy")
_PAD = "aten::constant_pad_nd"  # transformers pads biases of tied heads, mostly by nothing
_EMPTY = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_UNSET = (*_EMPTY, "aten::empty", "aten::empty_strided")


def takes_a_module(initialiser: Callable[..., Any]) -> bool:
    """Returns whether a bound ``_init_weights`` takes one module, as Hugging Face calls it."""
    try:
        inspect.signature(initialiser).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def is_as_drawn(parameter: Tensor) -> bool:
    """Returns whether a real parameter still has the values that its module's own code drew."""
    _settle()
    known: _Checksum | None = getattr(parameter, _CHECKSUM, None)
    return known is not None and not parameter.is_meta and _checksum(parameter) == known


def writes_of(parameter: Tensor) -> list[Write]:
    """Returns the writes to repeat on a parameter on the meta device, in this order."""
    _settle()
    found: list[Write] = getattr(parameter, _WRITES, [])
    return found


def forget_draws(root: nn.Module) -> None:
    """Declares the values of the parameters of a model final, whichever code wrote them."""
    _forget(root, _CHECKSUM)


def forget_writes(root: nn.Module) -> None:
    """Forgets the writes that were noted for the parameters of a model."""
    _forget(root, _WRITES)


def _forget(root: nn.Module, attribute: str) -> None:
    for parameter in root.parameters():
        parameter.__dict__.pop(attribute, None)


def note_value(real: Tensor, delayed: Tensor) -> None:
    """Notes the values of a parameter that leaves its memory for the meta device.

    Args:
        real: tensor with the values.
        delayed: parameter on the meta device that takes its place.
    """
    if _here.watch is not None:
        _here.watch.note_value(real.detach(), delayed)


@contextmanager
def noting_writers() -> Iterator[None]:
    """Notes writes of this thread to parameters of modules that are made inside. May be nested."""
    if _here.watch is not None:
        yield
        return
    _here.watch = watch = _Watch()
    try:
        with _wrappers.open(), watch:
            yield
    finally:
        _here.watch = None
        watch.settle()


class _Writer(Enum):
    """The last writers of real memory whose values may be drawn, or are none."""

    NONE = auto()
    OWN_CODE = auto()


@dataclass
class _Record:
    """A storage on the meta device, kept so that its address is not used again, and its writes."""

    storage: torch.UntypedStorage
    writes: list[Write] = field(default_factory=list)
    number: float | None = None  # number that fills the storage


class _Watch(TorchDispatchMode):
    """Follows the writers of storages in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.in_own_code = False
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._records: dict[int, _Record] = {}
        # Real storages. The references keep addresses from being used again.
        self._writers: dict[int, tuple[StorageWeakRef, _Writer]] = {}
        self._limit = _MANY

    def note_value(self, real: Tensor, delayed: Tensor) -> None:
        """Implements the function of this name."""
        has_value = real.numel() > 0 and self._writer_of(real) is not _Writer.NONE
        if has_value and not self.in_own_code and real.layout == torch.strided:
            self._record_of(delayed).writes.append(write_of_value(real, delayed))

    def settle(self) -> None:
        """Attaches what was noted so far to each parameter.

        It is not kept with its memory, because a cast after the context exchanges that.
        """
        for module in self.modules:
            for parameter in filter(_has_storage, module._parameters.values()):
                assert parameter is not None
                if not parameter.is_meta:
                    if self._writer_of(parameter) is _Writer.OWN_CODE:
                        setattr(parameter, _CHECKSUM, _checksum(parameter))
                elif record := self._records.get(_key(parameter)):
                    writes = list(record.writes)
                    if not _is_whole(parameter):  # its views would differ
                        writes = [Write(write.func, None) for write in writes]
                    setattr(parameter, _WRITES, writes)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(filter(_has_storage, pytree.tree_leaves((args, kwargs))))
        written = list(filter(_has_storage, written_tensors(func, args, kwargs)))
        for tensor in written:
            if tensor.is_meta:
                self._note_write(func, args, kwargs, tensor)
        result = func(*args, **kwargs)
        known = set(map(_key, given))
        made = [t for t in filter(_has_storage, pytree.tree_leaves(result)) if _key(t) not in known]
        source = given[0] if given and _copies(func, args) else None
        for tensor in written:
            if not tensor.is_meta:
                self._set_writer(tensor, _Writer.OWN_CODE if self.in_own_code else None)
        for tensor in made:
            if tensor.is_meta:
                self._note_made(func, args, given, written, tensor, source)
            elif func._schema.name in _UNSET:
                self._set_writer(tensor, _Writer.NONE)
            elif self.in_own_code:
                self._set_writer(tensor, _Writer.OWN_CODE)
            elif source is not None:
                self._set_writer(tensor, self._writer_of(source))
        return result

    # ---- real tensors

    def _writer_of(self, tensor: Tensor) -> _Writer | None:
        known = self._writers.get(_key(tensor))
        return None if known is None else known[1]

    def _set_writer(self, tensor: Tensor, writer: _Writer | None) -> None:
        if writer is None:
            self._writers.pop(_key(tensor), None)
            return
        if len(self._writers) >= self._limit:
            self._writers = {k: v for k, v in self._writers.items() if not v[0].expired()}
            self._limit = max(_MANY, 2 * len(self._writers))
        self._writers[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), writer

    # ---- tensors on the meta device

    def _record_of(self, tensor: Tensor) -> _Record:
        storage = tensor.untyped_storage()
        return self._records.setdefault(storage._cdata, _Record(storage))

    def _note_write(self, func: OpOverload, args: Any, kwargs: Any, written: Tensor) -> None:
        """Notes a write to a tensor; its module's own code undoes earlier ones."""
        if self.in_own_code:
            self._record_of(written).writes.clear()
            return
        write = write_of_call(func, args, kwargs, written, self._number_in)
        self._record_of(written).writes.append(write)

    def _number_in(self, tensor: Tensor) -> float | None:
        record = self._records.get(_key(tensor))
        return None if record is None or record.writes else record.number

    def _note_made(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        given: list[Tensor],
        written: list[Tensor],
        made: Tensor,
        source: Tensor | None,
    ) -> None:
        """Notes a computed tensor, which may become a parameter."""
        if not any(tensor.is_meta for tensor in given):
            if func._schema.name == "aten::scalar_tensor":
                self._record_of(made).number = args[0]
        elif not written and not self.in_own_code and func._schema.name not in _EMPTY:
            writes = [Write(func, None)]
            if source is not None and _is_whole(source):
                known = self._records.get(_key(source))
                writes = [] if known is None else list(known.writes)
            self._record_of(made).writes = writes


class _Here(threading.local):
    """The open context of this thread."""

    watch: _Watch | None = None


_here = _Here()


def _settle() -> None:
    if _here.watch is not None:
        _here.watch.settle()


def _watch_module(module: nn.Module) -> None:
    """Watches a new module, and the own code of its class before a parameter of it exists."""
    if _here.watch is not None:
        _here.watch.modules.add(module)
        for cls in type(module).__mro__:
            for name in (*RESETS, INITIALISER):
                _wrappers.wrap(cls, name, _around_own_code)


_wrappers = MethodWrappers(_watch_module)


def _around_own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        watch = _here.watch
        modules = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Module)]
        if watch is None or watch.in_own_code or not modules:
            return method(*args, **kwargs)
        watch.modules.update(modules)  # may be of an earlier context
        watch.in_own_code = True
        try:
            return method(*args, **kwargs)
        finally:
            watch.in_own_code = False

    return wrapper


def _copies(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Returns whether the result is a copy of the first argument, in memory of its own."""
    return func._schema.name in _COPIES or (func._schema.name == _PAD and not any(args[1]))


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value) and value.layout == torch.strided


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: Tensor) -> bool:
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and num_bytes == tensor.untyped_storage().nbytes()


def _checksum(tensor: Tensor) -> _Checksum:
    """Returns the checksum of a tensor of any dtype; reads the tensor once."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    flat = flat.view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words, rest = flat[:whole].view(torch.int64), flat[whole:]
    return tensor.shape, tensor.dtype, int(words.sum()), int(rest.sum())
