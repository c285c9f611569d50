"""Attributes that modules write in a forward; caller and callee each have a copy.

A layer keeps its auxiliary loss in an attribute, and its parent reads it; a parent sets the mask
that its layer reads. In one process both see one module. Across ranks a call takes along the values
written to the callee and to the modules below it, and brings back the values that these wrote.

Microbatches take turns on one module, so such an attribute has a value of its own in each of them.
Outside of microbatches it has the last written value. The trace of the model finds these attributes
(`smp.modules.module_writes`). Other writes of a forward to a module of another rank would not be
seen there, so they are refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

import smp._C as _C
from smp.modules.attributes import PerMicrobatch, inherited, is_same, is_state, with_properties
from smp.modules.module_writes import Key, ModuleWrites

# Values written in this microbatch on this rank, by identity of the module and attribute name.
_values: ContextVar[dict[tuple[int, str], Any] | None] = ContextVar("smp_values", default=None)

# Kind of model code that runs in this context; None in a step function around the model.
_running: ContextVar[Running | None] = ContextVar("smp_running", default=None)

# A function of a module, an attribute name and a value, called before an assignment or deletion.
_Check = Callable[[nn.Module, str, Any], None]


class _Gone(Enum):
    """The value of a deleted attribute; it travels as such."""

    DELETED = auto()


_DELETED = _Gone.DELETED
_UNKNOWN = object()
_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), _Gone)


class Running(Enum):
    """The kinds of model code."""

    BODY = auto()  # code that a step function calls
    CALL = auto()  # code called by another rank, or by an earlier stage


class Unavailable:
    """A placeholder for a value that cannot travel; its use is an error.

    Args:
        what: description of the attribute.
    """

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __reduce__(self) -> tuple[type[Unavailable], tuple[str]]:
        return Unavailable, (self.__dict__["_what"],)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__['_what']} was written on another pipeline rank, and its value cannot "
            "be sent: let the module return it as tensors, numbers or containers of them, or put "
            "the module and its reader on one partition"
        )


def begin_context(values: dict[tuple[int, str], Any]) -> None:
    """Begins a microbatch, or the service of a call for it, in this context.

    Args:
        values: values that this rank has written in the microbatch so far.
    """
    _values.set(values)


def context() -> int | None:
    """Returns a number for the microbatch or backward that runs on this rank, or None."""
    values = _values.get()
    if values is not None:
        return id(values)
    return -threading.get_ident() if _C.in_context() else None


@contextmanager
def running(what: Running) -> Iterator[None]:
    """Marks the code inside as model code that runs for a microbatch."""
    token = _running.set(what)
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def apart() -> Iterator[None]:
    """Lets writes inside belong to no microbatch."""
    token = _values.set(None)
    try:
        yield
    finally:
        _values.reset(token)


def _found(name: str, module: nn.Module) -> Any:
    """Returns the value in this microbatch, or `_DELETED`."""
    values = _values.get() or {}
    return values.get((id(module), name), _table_of(module, name).get(name, _DELETED))


def _read(base: type, name: str, module: nn.Module) -> Any:
    found = _found(name, module)
    return inherited(base, name, module) if found is _DELETED else found


def _write(name: str, module: nn.Module, value: Any) -> None:
    values = _values.get()
    if values is not None:
        values[id(module), name] = value
    dict.__setitem__(_table_of(module, name), name, value)  # not noted as a swap


def _delete(name: str, module: nn.Module) -> None:
    if _found(name, module) is _DELETED:
        raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")
    _forget(name, module)


def _forget(name: str, module: nn.Module) -> None:
    values = _values.get()
    if values is not None:
        values[id(module), name] = _DELETED
    # PyTorch's __delattr__ would call this function again.
    _table_of(module, name).pop(name, None)


def _table_of(module: nn.Module, name: str) -> dict[str, Any]:
    return module._buffers if name in module._buffers else module.__dict__


def _reduce(base: type, module: nn.Module, protocol: int) -> Any:
    """Pickles a module as one of its own class."""
    reduced: Any = nn.Module.__reduce_ex__(module, protocol)  # type: ignore[no-untyped-call]
    function, args, *rest = reduced
    return (function, tuple(base if arg is type(module) else arg for arg in args), *rest)


def _with_own_values(
    base: type[nn.Module], names: Sequence[str], check: _Check | None = None
) -> type:
    """Returns a subclass of ``base`` with a value per microbatch for some attributes and buffers.

    Args:
        base: class of a module.
        names: names of these attributes.
        check: function that is called first when any attribute is assigned or deleted.
    """

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if check is not None:
            check(module, name, value)
        if name in names:  # PyTorch would write to a buffer without calling the property
            _write(name, module, value)
        else:
            base.__setattr__(module, name, value)

    def delete_attribute(module: nn.Module, name: str) -> None:
        if check is not None:
            check(module, name, _DELETED)
        base.__delattr__(module, name)

    properties = {
        name: PerMicrobatch(
            functools.partial(_read, base, name),
            functools.partial(_write, name),
            functools.partial(_delete, name),
        )
        for name in names
    }
    return with_properties(
        base,
        properties,
        __setattr__=set_attribute,
        __delattr__=delete_attribute,
        __reduce_ex__=lambda module, protocol: _reduce(base, module, protocol),
    )


class ModuleState:
    """The writes of forwards to the modules of one model.

    Args:
        modules: modules of the model.
        names: names of the modules, for errors.
        writes: writes of the forwards, by the trace.
        owners: global ranks, by index, of modules of other ranks and of modules of later stages of
            this rank.
        global_rank: global rank of this process.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Sequence[str],
        writes: ModuleWrites,
        owners: Mapping[int, int],
        global_rank: int,
    ) -> None:
        self._modules = modules
        self._names = names
        self._own: dict[int, list[str]] = {}
        for idx, name in sorted(writes.own):
            self._own.setdefault(idx, []).append(name)
        self._users = writes.users
        self._owners = owners
        self._global_rank = global_rank
        self._carried = writes.carried
        self._followed = {(idx, name) for _, idx, name in writes.users}
        self._ids = {module: i for i, module in enumerate(modules)}
        self._shared: dict[int, list[Key]] = {}
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        """Gives attributes a value per microbatch from now on."""
        checked: dict[type[nn.Module], type] = {}
        for idx in sorted({*self._own, *self._owners}):
            module, check = self._modules[idx], self._check if idx in self._owners else None
            base = type(module)
            attributes = [
                name
                for name in self._own.get(idx, ())
                if not hasattr(getattr(base, name, 0), "__set__")
            ]
            if attributes:
                made = _with_own_values(base, attributes, check)
            elif check is not None:
                made = checked.get(base) or _with_own_values(base, (), check)
                checked[base] = made
            else:
                continue
            module.__class__ = made
            self._undo.append(functools.partial(setattr, module, "__class__", base))

    def close(self) -> None:
        """Gives the modules their classes back. May be called twice."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _check(self, module: nn.Module, name: str, value: Any) -> None:
        """Checks a write of this rank's code to a module of another rank or of a later stage.

        Raises:
            RuntimeError: nothing brings the value there.
        """
        where = _running.get()
        if where is None or _values.get() is None or not is_state(name):
            return
        idx = self._ids[module]
        owner = self._owners[idx]
        if owner == self._global_rank and where is Running.CALL:
            return  # the later stage itself writes
        tables = (module._parameters, module._modules, module._buffers, module.__dict__)
        now = next((table[name] for table in tables if name in table), _DELETED)
        if now is _DELETED:
            now = getattr(type(module), name, _DELETED)
        if (idx, name) in self._followed or is_same(now, value):
            return
        raise RuntimeError(
            f"{_C.rank_prefix()}the model's forward {_how(now, value)} attribute '{name}' of "
            f"module '{self._names[idx]}', which lives on global_rank {owner}, where the change "
            "would not be visible. The trace of the model has not seen this write, or there was no "
            "trace. Pass the value as an argument, let the partition be traced "
            "(skip_tracing=False, no manual partition) in a call that does so, or put the module "
            "and what writes to it on one partition (smp.set_partition)"
        )

    def _shared_with(self, module_id: int) -> list[Key]:
        """Returns the attributes that code of a module and of those below shares with others."""
        keys = self._shared.get(module_id)
        if keys is None:
            modules = self._modules[module_id].modules() if self._users else ()
            ids = {self._ids[module] for module in modules if module in self._ids}
            used = {(i, name) for user, i, name in self._users if user in ids or i in ids}
            keys = self._shared[module_id] = sorted(used)
        return keys

    def values(self, module_id: int) -> dict[Key, Any] | None:
        """Returns values of attributes that the code of a module shares with others, or None.

        These were written in this microbatch, or carried over from the one before.
        """
        written = _values.get() or {}
        found = {}
        for idx, name in self._shared_with(module_id):
            module = self._modules[idx]
            value = written.get((id(module), name), _UNKNOWN)
            if value is _UNKNOWN and (idx, name) in self._carried:
                value = getattr(module, name, _DELETED)
            if value is not _UNKNOWN:
                found[idx, name] = self._fit_to_travel(idx, name, value)
        return found or None

    def take(self, values: Mapping[Key, Any] | None, is_same_rank: bool = False) -> None:
        """Writes values that came from another rank.

        Args:
            values: values by module and name.
            is_same_rank: whether code of this rank wrote them to the same modules. Then only the
                microbatch gets them: caller and callee do not wait for each other.
        """
        for (idx, name), value in (values or {}).items():
            module = self._modules[idx]
            is_apart = is_same_rank or name in module._buffers  # the owner keeps the buffer itself
            if is_apart and (written := _values.get()) is not None:
                written[id(module), name] = value
            elif value is _DELETED:
                _forget(name, module)
            else:
                setattr(module, name, value)

    def _fit_to_travel(self, idx: int, name: str, value: Any) -> Any:
        if _is_plain(value):
            return value
        return Unavailable(
            f"attribute '{name}' ({type(value).__name__}) of module '{self._names[idx]}'"
        )


def _how(now: Any, value: Any) -> str:
    return "deletes" if value is _DELETED else "creates" if now is _DELETED else "changes"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
