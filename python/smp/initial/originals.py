"""Modules whose place distributed ones have taken, as the source of initial values.

A distributed module that has no values yet is to get those that the module of the user would have
got: drawn whole by its code under its name, and cut. So that one is kept, without memory, until
the values have been made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smp.tensor_parallel import sharding

_ORIGINAL = "_smp_original"
Translate = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Original:
    """Where a distributed module gets its initial values from.

    Attributes:
        module: of the user, with parameters on the meta device; None: from its own code.
        translate: a state dict of it to one of the distributed module, whose entries are views of
            what it was given; None: the names are equal.
    """

    module: nn.Module | None
    translate: Translate | None


@dataclass(frozen=True)
class Cut:
    """A parameter to fill, and which view of a whole one it is filled from."""

    target: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def out_of(self, whole: Tensor) -> Tensor:
        """The part of a tensor with the strides of the one that the view was taken of."""
        view = whole.as_strided(self.size, self.stride, self.offset)
        return sharding.slice_of(view, sharding.interval_of(self.target))


def keep_original(made: nn.Module, module: nn.Module | None, translate: Translate | None) -> None:
    """Makes ``made``, which is on the meta device, get its initial values from ``module``.

    Args:
        made: the distributed module.
        module: whose place it has taken; None: its values are its own.
        translate: see :class:`Original`.
    """
    made.__dict__[_ORIGINAL] = Original(module, translate)


def distributed_in(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules that have taken the place of others and wait for their values."""
    return [(name, module) for name, module in root.named_modules() if _ORIGINAL in module.__dict__]


def forget_originals(root: nn.Module) -> None:
    """Lets go of what was kept for the modules of a model."""
    for module in root.modules():
        module.__dict__.pop(_ORIGINAL, None)


def cuts_of(
    root: nn.Module, is_wanted: Callable[[nn.Parameter], bool]
) -> dict[nn.Parameter, list[Cut]]:
    """What is cut out of the parameters of originals, by these parameters.

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
    """The model as the user made it; distributed modules are back on exit."""
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
