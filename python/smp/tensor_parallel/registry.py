"""Which module classes have a distributed form, and how calls and arguments are translated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

Arguments = tuple[Iterable[Any], Mapping[str, Any]]
Translator = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Declined:
    """What an init hook returns when a module cannot be distributed.

    Attributes:
        reason: for people: the field, its value and what is supported.
    """

    reason: str


class Unsupported(ValueError):
    """A distributed module cannot have these sizes or options; the text says why."""


class Adapter(Protocol):
    """Stands between the callers of a replaced module and its distributed form, for one call."""

    def forward_args(self, *args: Any, **kwargs: Any) -> Arguments:
        """Arguments of the distributed ``forward`` out of those of the original."""
        ...

    def wrap(self, output: Any) -> Any:
        """What the original's caller expects."""
        ...


class HookAdapter:
    """Hooks of the public interface as an adapter.

    Args:
        forward_hook: arguments of the original's ``forward`` to those of the distributed one.
        return_hook: output of the distributed ``forward`` to that of the original.
    """

    def __init__(
        self,
        forward_hook: Callable[..., Arguments] | None,
        return_hook: Callable[[Any], Any] | None,
    ) -> None:
        self._forward_hook = forward_hook
        self._return_hook = return_hook

    def forward_args(self, *args: Any, **kwargs: Any) -> Arguments:
        if self._forward_hook is None:
            return args, kwargs
        return self._forward_hook(*args, **kwargs)

    def wrap(self, output: Any) -> Any:
        return output if self._return_hook is None else self._return_hook(output)


@dataclass(frozen=True)
class Registration:
    """How modules of exactly one class are replaced.

    Attributes:
        module_cls: class of the original.
        dist_module: class of its replacement.
        init_hook: arguments of the original's ``__init__`` to ``(args, kwargs)`` of the distributed
            one; ``Declined`` or None to leave the module alone.
        adapter: makes the :class:`Adapter` of one call of the distributed module that it is given;
            None: calls stay as they are.
        translators: of state dicts: distributed to original, original to distributed; None: the
            names are equal, or there are no weights to take over.
        options_of: further keyword arguments of the distributed ``__init__``, which only the module
            itself tells, not the arguments it was made with.
        arguments_of: arguments of ``__init__`` out of a module; None: they are recorded when the
            module is made.
        deduced_from: the same for modules without a record, as they are copies or were made before
            the class was registered; out of a module and those around it, nearest first; None where
            that does not tell.
        was_initialised: whether a module's weights are worth taking over; None: they are when they
            are real.
        family: of models, for messages.
    """

    module_cls: type[nn.Module]
    dist_module: type[nn.Module]
    init_hook: Callable[..., Arguments | Declined | None] | None = None
    adapter: Callable[[nn.Module], Adapter] | None = None
    translators: tuple[Translator, Translator] | None = None
    options_of: Callable[[nn.Module], Mapping[str, Any]] | None = None
    arguments_of: Callable[[nn.Module], Arguments] | None = None
    deduced_from: Callable[[nn.Module, Sequence[nn.Module]], Arguments | None] | None = None
    was_initialised: Callable[[nn.Module], bool] | None = None
    family: str | None = None


_registrations: dict[type[nn.Module], Registration] = {}
_arguments: WeakKeyDictionary[nn.Module, Arguments] = WeakKeyDictionary()
_RECORDED = "_smp_records_arguments"


def register(registration: Registration) -> None:
    """Adds a registration, or replaces that of the same class."""
    _registrations[registration.module_cls] = registration
    if registration.arguments_of is None:
        _record_arguments(registration.module_cls)


def is_registered(module_cls: type[nn.Module]) -> bool:
    """Whether modules of exactly this class have a distributed form."""
    return module_cls in _registrations


def registration_of(module: nn.Module) -> Registration | None:
    """The registration of a module's very class; those of its bases do not count."""
    return _registrations.get(type(module))


def arguments_of(module: nn.Module, around: Sequence[nn.Module] = ()) -> Arguments | None:
    """With which arguments a module was made, by reference; None if nobody knows.

    Args:
        module: of a registered class.
        around: the modules that it is in, nearest first.
    """
    registration = _registrations[type(module)]
    if registration.arguments_of is not None:
        return registration.arguments_of(module)
    recorded = _arguments.get(module)
    if recorded is None and registration.deduced_from is not None:
        return registration.deduced_from(module, around)
    return recorded


def _record_arguments(cls: type[nn.Module]) -> None:
    """Wraps ``__init__`` of a class, once, so that it notes what it was called with."""
    if _RECORDED in cls.__dict__:
        return
    original = cls.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is cls:
            _arguments[self] = (args, kwargs)

    cls.__init__ = init  # type: ignore[method-assign]
    setattr(cls, _RECORDED, True)
