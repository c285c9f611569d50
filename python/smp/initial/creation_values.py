"""Tells the values that a module's own code drew for a parameter from all others.

Values that ``reset_parameters`` of a module, or ``_init_weights`` of the Hugging Face model around
it, wrote last can be drawn again, on other random numbers. Values of other writers (a checkpoint, a
constructor, the user) cannot, and have to stay. A checksum taken after the module's own code tells
the last writer: version counters miss writes to ``.data``.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_CHECKSUM = "_smp_drawn_checksum"
_Checksum = tuple[torch.Size, torch.dtype, int, int]

#: methods that initialise the module that has them
RESETS = ("reset_parameters", "_reset_parameters")
#: method that initialises the module that it is given
INITIALISER = "_init_weights"


def is_as_drawn(parameter: Tensor) -> bool:
    """Returns whether a parameter still has the values its own code drew in `noting_draws`."""
    known: _Checksum | None = getattr(parameter, _CHECKSUM, None)
    return known is not None and not parameter.is_meta and _checksum(parameter) == known


def forget_draws(parameter: Tensor) -> None:
    """Declares the values of a parameter final, whichever code wrote them."""
    parameter.__dict__.pop(_CHECKSUM, None)


def takes_a_module(initialiser: Callable[..., Any]) -> bool:
    """Returns whether a bound ``_init_weights`` takes one module, as Hugging Face calls it."""
    try:
        inspect.signature(initialiser).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def is_in_own_code() -> bool:
    """Returns whether this thread runs a module's own code, inside of :func:`noting_draws`."""
    return _noting.open.in_own_code


def modules_made() -> list[nn.Module]:
    """Returns the modules that this thread created or copied in the open :func:`noting_draws`."""
    return list(_noting.open.modules)


def written_by(func: OpOverload, args: tuple[Any, ...], kwargs: Any) -> list[Tensor]:
    """Returns the tensors that a call of an operator writes to."""
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
        listed = given if isinstance(given, list | tuple) else (given,)
        written += [tensor for tensor in listed if isinstance(tensor, Tensor)]
    return written


@contextmanager
def noting_draws() -> Iterator[None]:
    """Notes what modules that are created inside draw, in this thread. May be nested."""
    _noting.open.depth += 1
    _noting.begin()
    try:
        yield
    finally:
        _noting.end()
        _noting.open.depth -= 1
        if _noting.open.depth == 0:
            _noting.open.modules.clear()


def _checksum(tensor: Tensor) -> _Checksum:
    """Returns the checksum of a tensor of any dtype; reads the tensor once."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    flat = flat.view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words, rest = flat[:whole].view(torch.int64), flat[whole:]
    return tensor.shape, tensor.dtype, int(words.sum()), int(rest.sum())


class _Open(threading.local):
    """Contexts and calls of modules' own code that are open in this thread."""

    depth = 0
    in_own_code = False

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Noting:
    """Wraps `nn.Module` and the classes of created modules while a context is open."""

    def __init__(self) -> None:
        self.open = _Open()
        self._lock = threading.RLock()
        self._num_open = 0
        self._wrapped: list[tuple[type, str, Any, Any]] = []
        self._classes: set[type] = set()
        self._drawn: set[_Checksum] = set()

    def begin(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._wrap(nn.Module, "__init__", self._at_creation)
                self._wrap(nn.Module, "__setstate__", self._at_copy)

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open > 0:
                return
            for cls, name, original, wrapper in reversed(self._wrapped):
                # Other code may have wrapped ours since; with no context open ours does nothing.
                if cls.__dict__.get(name) is wrapper:
                    setattr(cls, name, original)
            self._wrapped.clear()
            self._classes.clear()
            self._drawn.clear()

    def _wrap(self, cls: type, name: str, make: Callable[[Any], Any]) -> None:
        original = cls.__dict__[name]
        if isinstance(original, staticmethod):
            wrapper: Any = staticmethod(make(original.__func__))
        elif inspect.isfunction(original):
            wrapper = make(original)
        else:
            return
        self._wrapped.append((cls, name, original, wrapper))
        setattr(cls, name, wrapper)

    def _at_creation(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            method(module, *args, **kwargs)
            if self.open.depth > 0:
                self.open.modules.add(module)
                self._watch_class(type(module))

        return wrapper

    def _at_copy(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``__setstate__``: a deep copy has its original's values, but no attributes."""

        @functools.wraps(method)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            method(module, *args, **kwargs)
            if self.open.depth == 0:
                return
            self.open.modules.add(module)
            self._watch_class(type(module))
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_meta:
                    checksum = _checksum(parameter)
                    if checksum in self._drawn:
                        setattr(parameter, _CHECKSUM, checksum)

        return wrapper

    def _watch_class(self, module_cls: type) -> None:
        """Wraps the own code of a class, before any parameter of the new module exists."""
        if module_cls in self._classes:
            return
        with self._lock:
            for cls in module_cls.__mro__:
                if cls in self._classes or cls is nn.Module or cls is object:
                    continue
                self._classes.add(cls)
                for name in (*RESETS, INITIALISER):
                    if name in cls.__dict__:
                        self._wrap(cls, name, self._around_own_code)

    def _around_own_code(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            modules = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Module)]
            if self.open.depth == 0 or self.open.in_own_code or not modules:
                return method(*args, **kwargs)
            # An initialiser is called on a model, and its argument is the module to initialise.
            module = modules[-1]
            before = {id(p): _storage(p) for p in module.parameters() if not p.is_meta}
            self.open.in_own_code = True
            try:
                with _Written() as written:
                    return method(*args, **kwargs)
            finally:
                self.open.in_own_code = False
                for parameter in module.parameters():
                    if parameter.is_meta:
                        continue
                    now = _storage(parameter)
                    if now in written.storages or before.get(id(parameter)) != now:
                        checksum = _checksum(parameter)
                        self._drawn.add(checksum)
                        setattr(parameter, _CHECKSUM, checksum)

        return wrapper


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Written(TorchDispatchMode):
    """Notes the storages that operators write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.storages.update(map(_storage, written_by(func, args, kwargs)))
        return func(*args, **(kwargs or {}))


_noting = _Noting()
