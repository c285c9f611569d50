"""What the library puts around the ``forward`` of single modules of the user.

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
    """How often something was put around a forward, or taken away."""

    number = 0


def num_changes() -> int:
    """Another number means that something else stands around forwards than before.

    What is compiled does not count.
    """
    return _Changes.number


class Around(enum.IntEnum):
    """What may stand around a forward, from the inside to the outside."""

    COMPILED = -4
    """Runs what `torch.compile` has made of the forward."""
    OPERANDS = -3
    """Casts operands of operators in 16-bit training."""
    RECORD = -2
    """Notes what the module returns in the first training step."""
    CHECKS = -1
    """Looks for NaN and infinities in what goes in and what comes out."""
    PARAMETERS = 0
    """Fetches sharded parameters before, lets go of them after."""
    PLACE = 1
    """Says where in the model the running code is, of which masks of dropout depend."""
    CHECKPOINT = 2
    """Keeps the arguments only, and computes again in backward."""
    REMOTE = 3
    """Sends the call to the rank that owns the module."""


class _Chain:
    """The forward of one module and what stands around it; takes the forward's place.

    Stays the same object however the chain changes: somebody may have kept it.
    """

    def __init__(self, module: nn.Module, original: Forward, is_own: bool) -> None:
        self.module = module
        self.original = original
        self.is_own = is_own  # of the instance, not of its class
        self.wrappers: dict[Around, Callable[[Forward], Forward]] = {}
        self.tokens: dict[Around, object] = {}  # of the call that has put each of them there
        self.composed = original
        functools.update_wrapper(self, original)  # its signature is looked at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.composed(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Chain:
        """Makes the forward of the module's copy, which is the user's: nothing stands around it,
        but what casts its operands, without which it may not run."""
        chain = _Chain(
            copy.deepcopy(self.module, memo), copy.deepcopy(self.original, memo), self.is_own
        )
        if Around.OPERANDS in self.wrappers:
            chain.wrappers[Around.OPERANDS] = self.wrappers[Around.OPERANDS]
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
        """Puts back what the module had, unless somebody has set another forward since."""
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
    """The forward of a module's class, when it comes out of a pickle."""
    return types.MethodType(type(module).forward, module)


def _itself(forward: Forward) -> Forward:
    return forward


def _chain_of(module: nn.Module) -> _Chain | None:
    chain = module.__dict__.get(_CHAIN)
    return chain if isinstance(chain, _Chain) else None  # what a pickle has left is none


def wrap_forward(
    module: nn.Module, around: Around, wrapper: Callable[[Forward], Forward]
) -> Callable[[], None]:
    """Puts something around the forward of a module.

    Args:
        module: of the user.
        around: its place; replaces what was there.
        wrapper: makes a forward out of the one further inside. Called again when that changes.

    Returns:
        undoes it; may be called twice. Keeps neither the module nor the wrapper alive: who holds
        it may be found from a table of modules.
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
    _Changes.number += around != Around.COMPILED
    of_chain = weakref.ref(chain)

    def undo() -> None:
        chain = of_chain()
        if chain is None or chain.tokens.get(around) is not token:
            return
        del chain.wrappers[around], chain.tokens[around]
        _Changes.number += around != Around.COMPILED
        chain.compose()
        if not chain.wrappers:
            chain.uncover()

    return undo


def is_wrapped(module: nn.Module, around: Around) -> bool:
    """Does this stand around the forward of the module?"""
    chain = _chain_of(module)
    return chain is not None and around in chain.wrappers


def may_be_lifted(
    wrapper: Callable[[Forward], Forward],
) -> Callable[[Forward], Forward]:
    """Says of what is put around a forward that it is done already where the module runs inside of
    a compiled one: it waits for watched parameters (`smp.storage.watched`), which are read there,
    or sets a mode that holds there."""
    wrapper.__dict__["may_be_lifted"] = True
    return wrapper


class Lifted:
    """Modules whose forwards are for a while what they were before anybody put something around
    them that may be lifted.

    Args:
        modules: that nothing else stands around.
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


def standing_around(module: nn.Module) -> dict[Around, Callable[[Forward], Forward]]:
    """What stands around the forward of a module, by its place."""
    chain = _chain_of(module)
    return {} if chain is None else dict(chain.wrappers)


def uncover(module: nn.Module) -> None:
    """Takes everything from around the forward of a module but what casts its operands, without
    which it may not run; for code that puts back its ``__dict__`` afterwards."""
    chain = _chain_of(module)
    if chain is not None:
        chain.uncover()
        if Around.OPERANDS in chain.wrappers:
            module.__dict__["forward"] = chain.wrappers[Around.OPERANDS](chain.original)
