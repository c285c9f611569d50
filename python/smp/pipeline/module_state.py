"""Attributes that modules write in a forward, of which caller and callee have a copy each.

A layer keeps its auxiliary loss in an attribute, and its parent reads it; a parent sets the mask
that its layer reads. In one process both see one module. Across ranks a call takes along what was
written to the callee and to the modules below it, and brings back what these have written.

Microbatches take turns on one module, so such an attribute has a value of its own in each of them;
outside of microbatches it has the one that was written last. The trace of the model tells which
attributes these are (`smp.modules.module_writes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from smp.modules.module_writes import Key, ModuleWrites

# By identity of the module and name: what was written in this microbatch on this rank.
_values: ContextVar[dict[tuple[int, str], Any] | None] = ContextVar("smp_values", default=None)

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


class Unavailable:
    """In place of a value that cannot travel; its use is an error.

    Args:
        what: names the attribute.
    """

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __reduce__(self) -> tuple[type[Unavailable], tuple[str]]:
        return Unavailable, (self.__dict__["_what"],)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__['_what']} was written on another pipeline rank, and its value cannot "
            "travel: let the module return it as tensors, numbers or containers of them, or put "
            "the module and its reader on one partition"
        )


def begin_context(values: dict[tuple[int, str], Any]) -> None:
    """A microbatch, or the service of a call for it, begins in this context.

    Args:
        values: what this rank has written in the microbatch so far.
    """
    _values.set(values)


@contextmanager
def apart() -> Iterator[None]:
    """Inside, what is written belongs to no microbatch."""
    token = _values.set(None)
    try:
        yield
    finally:
        _values.reset(token)


def _read(base: type, name: str, module: nn.Module) -> Any:
    values = _values.get()
    if values is not None and (key := (id(module), name)) in values:
        return values[key]
    if name in module.__dict__:
        return module.__dict__[name]
    if hasattr(base, name):
        return getattr(base, name)
    return nn.Module.__getattr__(module, name)


def _write(name: str, module: nn.Module, value: Any) -> None:
    values = _values.get()
    if values is not None:
        values[id(module), name] = value
    if name in module._buffers:
        module._buffers[name] = value
    else:
        module.__dict__[name] = value


def _delete(name: str, module: nn.Module) -> None:
    values = _values.get()
    if values is not None:
        values.pop((id(module), name), None)
    # PyTorch's own would come here again.
    table = module._buffers if name in module._buffers else module.__dict__
    if name not in table:
        raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")
    del table[name]


def _reduce(base: type, module: nn.Module, protocol: int) -> Any:
    """Pickles a module as one of its own class."""
    reduced: Any = nn.Module.__reduce_ex__(module, protocol)  # type: ignore[no-untyped-call]
    function, args, *rest = reduced
    return (function, tuple(base if arg is type(module) else arg for arg in args), *rest)


def _with_own_values(base: type[nn.Module], names: Sequence[str]) -> type:
    """``base``, whose instances have a value per microbatch for some attributes and buffers."""

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if name in names:  # PyTorch's own would write to a buffer behind the property
            _write(name, module, value)
        else:
            base.__setattr__(module, name, value)

    body: dict[str, Any] = {
        name: property(
            functools.partial(_read, base, name),
            functools.partial(_write, name),
            functools.partial(_delete, name),
        )
        for name in names
    }
    body["__setattr__"] = set_attribute
    body["__reduce_ex__"] = lambda module, protocol: _reduce(base, module, protocol)
    # Registries of other libraries know a class by its name.
    body |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), body)


class ModuleState:
    """What forwards write to the modules of one model.

    Args:
        modules: of the model.
        names: of the modules, for errors.
        writes: what forwards write.
    """

    def __init__(
        self, modules: Sequence[nn.Module], names: Sequence[str], writes: ModuleWrites
    ) -> None:
        self._modules = modules
        self._names = names
        self._own: dict[int, list[str]] = {}
        for idx, name in sorted(writes.own):
            self._own.setdefault(idx, []).append(name)
        self._users = writes.users
        self._ids = {module: i for i, module in enumerate(modules)}
        self._shared: dict[int, list[Key]] = {}
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        """From now on each microbatch has values of its own."""
        for idx, names in self._own.items():
            module = self._modules[idx]
            base = type(module)
            attributes = [name for name in names if not hasattr(getattr(base, name, 0), "__set__")]
            if attributes:
                module.__class__ = _with_own_values(base, attributes)
                self._undo.append(functools.partial(setattr, module, "__class__", base))

    def close(self) -> None:
        """Gives the modules their classes back. May be called twice."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _shared_with(self, module_id: int) -> list[Key]:
        """What the code of a module and of those below it shares with others."""
        keys = self._shared.get(module_id)
        if keys is None:
            modules = self._modules[module_id].modules() if self._users else ()
            ids = {self._ids[module] for module in modules if module in self._ids}
            used = {(idx, name) for user, idx, name in self._users if user in ids}
            keys = self._shared[module_id] = sorted(used)
        return keys

    def values(self, module_id: int) -> dict[Key, Any] | None:
        """What was written in this microbatch, of what the code of a module shares with others."""
        written = _values.get() or {}
        found = {}
        for idx, name in self._shared_with(module_id):
            key = (id(self._modules[idx]), name)
            if key in written:
                found[idx, name] = self._fit_to_travel(idx, name, written[key])
        return found or None

    def take(self, values: Mapping[Key, Any] | None, is_same_rank: bool = False) -> None:
        """Writes what came from another rank.

        Args:
            values: by module and name.
            is_same_rank: code of this rank wrote them to the same modules. Only the microbatch
                takes them over: caller and callee do not wait for each other.
        """
        for (idx, name), value in (values or {}).items():
            module = self._modules[idx]
            is_apart = is_same_rank or name in module._buffers  # a buffer itself is its owner's
            if is_apart and (written := _values.get()) is not None:
                written[id(module), name] = value
            else:
                setattr(module, name, value)

    def _fit_to_travel(self, idx: int, name: str, value: Any) -> Any:
        if _is_plain(value):
            return value
        return Unavailable(
            f"attribute '{name}' ({type(value).__name__}) of module '{self._names[idx]}'"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
