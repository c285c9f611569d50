"""Keeps modules that distributed ones have replaced, as the source of initial values.

A distributed module without values gets those that the user's module would have got: drawn whole by
its code under its name, and cut. So the user's module is kept, without memory, until the values
have been made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smp.modules.materialize import exchange
from smp.tensor_parallel import sharding

_ORIGINAL = "_smp_original"
Translate = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Original:
    """The source of a distributed module's initial values.

    Attributes:
        module: the user's module, with parameters on the meta device; None: the distributed
            module's own code is the source.
        translate: turns the module's state dict into one of the distributed module, whose entries
            are views of the given ones; None: the names are equal.
    """

    module: nn.Module | None
    translate: Translate | None


@dataclass(frozen=True)
class Cut:
    """A parameter to fill, and the view of a whole parameter that fills it."""

    target: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fill(self, whole: Tensor) -> nn.Parameter:
        """Gives the target its part of ``whole``, which has the strides the view was made for."""
        if self.target is whole:  # a parameter that both modules hold has its values
            return self.target
        view = whole.as_strided(self.size, self.stride, self.offset)
        part = sharding.slice_of(view, sharding.interval_of(self.target))
        exchange(self.target, part.to(self.target.dtype, copy=True).contiguous())
        return self.target


def keep_original(made: nn.Module, module: nn.Module | None, translate: Translate | None) -> None:
    """Makes ``made``, which is on the meta device, get its initial values from ``module``.

    Args:
        made: the distributed module.
        module: module that ``made`` replaces; None: ``made`` draws its own values.
        translate: see :class:`Original`.
    """
    made.__dict__[_ORIGINAL] = Original(module, translate)


def distributed_in(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns names and modules that have replaced others and wait for their values."""
    return [(name, module) for name, module in root.named_modules() if _ORIGINAL in module.__dict__]


def forget_originals(root: nn.Module) -> None:
    """Forgets the originals kept for the modules of a model."""
    for module in root.modules():
        module.__dict__.pop(_ORIGINAL, None)


def cuts_of(
    root: nn.Module, is_wanted: Callable[[nn.Parameter], bool]
) -> dict[nn.Parameter, list[Cut]]:
    """Returns the cuts that fill distributed modules, by the originals' parameters.

    Args:
        root: the model.
        is_wanted: whether a parameter of a distributed module is to be filled.
    """
    cuts: dict[nn.Parameter, list[Cut]] = {}
    for _, made in distributed_in(root):
        original: Original = made.__dict__[_ORIGINAL]
        if original.module is None:
            continue
        wanted = [(n, p) for n, p in made.named_parameters() if p.is_meta and is_wanted(p)]
        if not wanted:
            continue
        given = original.module.state_dict(keep_vars=True)
        sources = {
            value.untyped_storage()._cdata: value
            for value in given.values()
            if isinstance(value, nn.Parameter) and value.is_meta
        }
        state = {k: v.detach() if isinstance(v, Tensor) else v for k, v in given.items()}
        if original.translate is not None:
            state = original.translate(state)
        for name, target in wanted:
            view = state.get(name)
            if not isinstance(view, Tensor) or list(view.shape) != sharding.whole_shape(target):
                continue
            source = sources.get(view.untyped_storage()._cdata)
            if source is not None:
                where = (tuple(view.shape), view.stride(), int(view.storage_offset()))
                cuts.setdefault(source, []).append(Cut(target, *where))
    return cuts


@contextmanager
def in_place(root: nn.Module) -> Iterator[nn.Module]:
    """Yields the model as the user made it; distributed modules are back on exit."""
    behind_root = _module_behind(root)
    if behind_root is not None:
        yield behind_root
        return
    slots = []
    for parent in list(root.modules()):
        for key, child in parent._modules.items():
            behind = None if child is None else _module_behind(child)
            if behind is not None:
                slots.append((parent, key, child))
                parent._modules[key] = behind
    try:
        yield root
    finally:
        for parent, key, child in slots:
            parent._modules[key] = child


def _module_behind(made: nn.Module) -> nn.Module | None:
    held: Original | None = made.__dict__.get(_ORIGINAL)
    return None if held is None else held.module
