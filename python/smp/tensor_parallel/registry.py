"""Registers the distributed forms of module classes, and translations of calls and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

Arguments = tuple[Iterable[Any], Mapping[str, Any]]
Translator = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Declined:
    """The result of an init hook for a module that cannot be distributed.

    Attributes:
        reason: text for users: the field, its value and the supported values.
    """

    reason: str


class Unsupported(ValueError):
    """Raised if a distributed module cannot have these sizes or options; the text has a reason."""


class Adapter(Protocol):
    """Translates one call between the callers of a replaced module and its distributed form."""

    def forward_args(self, *args: Any, **kwargs: Any) -> Arguments:
        """Returns arguments of the distributed ``forward`` for those of the original."""
        ...

    def wrap(self, output: Any) -> Any:
        """Returns the output in the form that the original's caller expects."""
        ...


class HookAdapter:
    """An adapter made of hooks of the public interface.

    Args:
        forward_hook: maps arguments of the original's ``forward`` to those of the distributed one.
        return_hook: maps the output of the distributed ``forward`` to that of the original.
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
    """The way in which modules of exactly one class are replaced.

    Attributes:
        module_cls: class of the original.
        dist_module: class of its replacement.
        init_hook: maps arguments of the original's ``__init__`` to ``(args, kwargs)`` of the
            distributed one; ``Declined`` or None to leave the module alone.
        adapter: makes the :class:`Adapter` of one call of the distributed module that it is given;
            None: calls stay as they are.
        translators: translators of state dicts: distributed to original, original to distributed;
            None: the names are equal, or there are no weights to copy.
        arguments_of: returns arguments of ``__init__`` for a module; None: they are recorded when
            the module is made.
        deduced_from: the same for modules without a record, because they are copies or were made
            before the class was registered; takes a module and those around it, nearest first;
            returns None if these do not suffice.
        problem_in: returns the reason why a module cannot be distributed, or None; takes it and the
            modules around it, nearest first.
        was_initialised: returns whether a module's weights are worth copying; None: real ones are.
        family: family of models, for messages.
    """

    module_cls: type[nn.Module]
    dist_module: type[nn.Module]
    init_hook: Callable[..., Arguments | Declined | None] | None = None
    adapter: Callable[[nn.Module], Adapter] | None = None
    translators: tuple[Translator, Translator] | None = None
    arguments_of: Callable[[nn.Module], Arguments] | None = None
    deduced_from: Callable[[nn.Module, Sequence[nn.Module]], Arguments | None] | None = None
    problem_in: Callable[[nn.Module, Sequence[nn.Module]], str | None] | None = None
    was_initialised: Callable[[nn.Module], bool] | None = None
    family: str | None = None

    @property
    def is_complete(self) -> bool:
        """Returns whether the distributed form has all of the original's tensors, by known names.

        Classes that users register may have parameters of their own, and leave others out.
        """
        return self.family is not None or self.arguments_of is not None


_registrations: dict[type[nn.Module], Registration] = {}
_arguments: WeakKeyDictionary[nn.Module, Arguments] = WeakKeyDictionary()
#: by module: the hooks that its own ``__init__`` has put on it and on its parts
_own_hooks: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
_RECORDED = "_smp_records_arguments"


def register(registration: Registration) -> None:
    """Adds a registration, or replaces the registration of the same class."""
    _registrations[registration.module_cls] = registration
    if registration.arguments_of is None:
        _record_arguments(registration.module_cls)


def is_registered(module_cls: type[nn.Module]) -> bool:
    """Returns whether modules of exactly this class have a distributed form."""
    return module_cls in _registrations


def distributed_classes() -> set[type[nn.Module]]:
    """Returns the classes that replace registered ones."""
    return {registration.dist_module for registration in _registrations.values()}


def registration_of(module: nn.Module) -> Registration | None:
    """Returns the registration of a module's exact class; those of its bases do not count."""
    return _registrations.get(type(module))


def registered_base(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the nearest base with a distributed form of a class that has none itself, or None."""
    bases = (base for base in cls.__mro__[1:] if base in _registrations)
    return None if cls in _registrations else next(bases, None)


def reason_of_class(cls: type[nn.Module]) -> str:
    """Returns the reason why modules of a class are not distributed, as the end of a sentence."""
    base = registered_base(cls)
    if base is None:
        return "has no distributed form; register one by smp.tp_register_with_module"
    return (
        f"is not distributed: it is a subclass of {base.__name__}, and may compute something else; "
        "register a form of its own by smp.tp_register_with_module"
    )


def arguments_of(module: nn.Module, around: Sequence[nn.Module] = ()) -> Arguments | None:
    """Returns the arguments that a module was made with, by reference; None if they are unknown.

    Args:
        module: module of a registered class.
        around: modules that contain it, nearest first.
    """
    registration = _registrations[type(module)]
    if registration.arguments_of is not None:
        return registration.arguments_of(module)
    recorded = _arguments.get(module)
    if recorded is None and registration.deduced_from is not None:
        return registration.deduced_from(module, around)
    return recorded


def own_hooks_of(module: nn.Module) -> frozenset[int]:
    """Returns ids of the hooks that a module's own ``__init__`` has set, if that was recorded.

    They belong to its class, so the author of a distributed form has considered them.
    """
    return _own_hooks.get(module, frozenset())


def _hooks_in(module: nn.Module) -> Iterator[int]:
    for part in module.modules():
        for name, table in part.__dict__.items():
            if name.endswith("_hooks") and isinstance(table, Mapping):
                yield from map(id, table.values())


def _record_arguments(cls: type[nn.Module]) -> None:
    """Wraps ``__init__`` of a class, once, so that it records its arguments."""
    if _RECORDED in cls.__dict__:
        return
    original = cls.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is cls:
            _arguments[self] = (args, kwargs)
            _own_hooks[self] = frozenset(_hooks_in(self))

    cls.__init__ = init  # type: ignore[method-assign]
    setattr(cls, _RECORDED, True)
