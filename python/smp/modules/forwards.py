"""Wraps the ``forward`` of single modules of the user.

Only instances ever get another ``forward``: their class, and ``super().forward``, stay untouched.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Forward = Callable[..., Any]

_CHAIN = "_smp_forwards"


class _Changes:
    """The number of times that a wrapper was put around a forward, or removed."""

    number = 0


def num_changes() -> int:
    """Returns a number that changes whenever wrappers around forwards change.

    Wrappers of compiled code do not count.
    """
    return _Changes.number


class WrapperKind(enum.IntEnum):
    """Kinds of wrappers around a forward, from the inside to the outside."""

    COMPILED = -4
    """Runs the forward as compiled by `torch.compile`."""
    OPERANDS = -3
    """Casts operands of operators in 16-bit training."""
    RECORD = -2
    """Records the module's output in the first training step."""
    CHECKS = -1
    """Looks for NaN and infinities in arguments and outputs."""
    PARAMETERS = 0
    """Fetches sharded parameters before the forward, and frees them after it."""
    PLACE = 1
    """Sets the place of the running code in the model, on which dropout masks depend."""
    ATTENTION = 2
    """Exchanges tokens against heads where a block computes a part of the tokens."""
    CHECKPOINT = 3
    """Keeps only the arguments, and computes again in backward."""
    SEQUENCE = 4
    """Cuts sequences into the parts of the ranks."""
    REMOTE = 5
    """Sends the call to the rank that owns the module."""


class _Chain:
    """The forward of one module and its wrappers; replaces the forward.

    It stays the same object when the chain changes, because other code may have kept it.
    """

    def __init__(self, module: nn.Module, original: Forward, is_own: bool) -> None:
        self.module = module
        self.original = original
        self.is_own = is_own  # whether the instance has its own forward, not only its class
        self.wrappers: dict[WrapperKind, Callable[[Forward], Forward]] = {}
        self.tokens: dict[WrapperKind, object] = {}  # identify the call that has put each wrapper
        self.composed = original
        functools.update_wrapper(self, original)  # other code inspects its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.composed(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Chain:
        """Copies the forward for the module's copy, which is the user's.

        The copy keeps only the wrapper that casts its operands, without which it may not run.
        """
        chain = _Chain(
            copy.deepcopy(self.module, memo), copy.deepcopy(self.original, memo), self.is_own
        )
        if WrapperKind.OPERANDS in self.wrappers:
            chain.wrappers[WrapperKind.OPERANDS] = self.wrappers[WrapperKind.OPERANDS]
            chain.compose()
        return chain

    def __reduce__(self) -> tuple[Callable[..., Forward], tuple[Any, ...]]:
        """Pickles the forward alone, for the same reason."""
        return (_itself, (self.original,)) if self.is_own else (_plain_forward, (self.module,))

    def compose(self) -> None:
        self.composed = self.original
        for _, wrapper in sorted(self.wrappers.items()):
            self.composed = wrapper(self.composed)

    def uncover(self) -> None:
        """Restores the module's own forward, unless other code has set another one since."""
        attributes = self.module.__dict__
        if attributes.get(_CHAIN) is self:
            del attributes[_CHAIN]
        if attributes.get("forward") is not self:
            return
        if self.is_own:
            attributes["forward"] = self.original
        else:
            del attributes["forward"]


def _plain_forward(module: nn.Module) -> Forward:
    """Returns the forward of a module's class, for unpickling."""
    return types.MethodType(type(module).forward, module)


def _itself(forward: Forward) -> Forward:
    return forward


def _chain_of(module: nn.Module) -> _Chain | None:
    chain = module.__dict__.get(_CHAIN)
    return chain if isinstance(chain, _Chain) else None  # a pickle leaves another object


def wrap_forward(
    module: nn.Module, around: WrapperKind, wrapper: Callable[[Forward], Forward]
) -> Callable[[], None]:
    """Puts a wrapper around the forward of a module.

    Args:
        module: module of the user.
        around: kind of wrapper; an earlier one of this kind is replaced.
        wrapper: function that makes a forward out of the one further inside. It is called again
            when that changes.

    Returns:
        function that undoes it; may be called twice. It keeps neither the module nor the wrapper
        alive, since tables whose keys are modules may refer to it.
    """
    chain = _chain_of(module)
    if chain is None:
        chain = _Chain(module, module.forward, "forward" in module.__dict__)
        # Not through nn.Module.__setattr__: it is neither parameter nor submodule.
        module.__dict__[_CHAIN] = module.__dict__["forward"] = chain
    token = object()
    chain.wrappers[around] = wrapper
    chain.tokens[around] = token
    chain.compose()
    _Changes.number += around != WrapperKind.COMPILED
    of_chain = weakref.ref(chain)

    def undo() -> None:
        chain = of_chain()
        if chain is None or chain.tokens.get(around) is not token:
            return
        del chain.wrappers[around], chain.tokens[around]
        _Changes.number += around != WrapperKind.COMPILED
        chain.compose()
        if not chain.wrappers:
            chain.uncover()

    return undo


def is_wrapped(module: nn.Module, around: WrapperKind) -> bool:
    """Returns whether the forward of a module has a wrapper of this kind."""
    chain = _chain_of(module)
    return chain is not None and around in chain.wrappers


def may_be_lifted(
    wrapper: Callable[[Forward], Forward],
) -> Callable[[Forward], Forward]:
    """Marks a wrapper as unnecessary where the module runs inside a compiled one.

    Such a wrapper waits for watched parameters (`smp.storage.watched`), which are read there, or
    sets a mode that holds there.
    """
    wrapper.__dict__["may_be_lifted"] = True
    return wrapper


class LiftableWrappers:
    """Modules whose wrappers can be removed for a while, since all of them may be lifted.

    Args:
        modules: modules without other wrappers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        chains = (_chain_of(module) for module in modules)
        self._chains = [chain for chain in chains if chain is not None]

    def lift(self) -> None:
        for chain in self._chains:
            if chain.is_own:
                chain.module.__dict__["forward"] = chain.original
            else:
                del chain.module.__dict__["forward"]

    def put_back(self) -> None:
        for chain in self._chains:
            chain.module.__dict__["forward"] = chain


def standing_around(module: nn.Module) -> dict[WrapperKind, Callable[[Forward], Forward]]:
    """Returns the wrappers of a module's forward, by kind."""
    chain = _chain_of(module)
    return {} if chain is None else dict(chain.wrappers)


def uncover(module: nn.Module) -> None:
    """Removes wrappers of a module's forward, for code that restores its ``__dict__`` afterwards.

    The wrapper that casts its operands stays, because the module may not run without it.
    """
    chain = _chain_of(module)
    if chain is not None:
        chain.uncover()
        if WrapperKind.OPERANDS in chain.wrappers:
            module.__dict__["forward"] = chain.wrappers[WrapperKind.OPERANDS](chain.original)
