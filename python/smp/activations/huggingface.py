"""Honours ``gradient_checkpointing_enable()`` of transformers wherever the layers live.

transformers stores a function in its modules that runs a layer as a checkpoint. Our replacement of
that function finds the layer and keeps its tensors like those of any checkpointed module: where the
layer lives, and in host memory with ``offload_activations``.

Releases from 4.53 on have a base class of layers that calls this function around the layer's
``__call__`` (4.x) or around the ``forward`` of its class (5.x). In earlier releases the model calls
it around each layer.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch.utils.checkpoint
from torch import nn

from smp.activations.marks import checkpoint_call, wrap_call
from smp.activations.placement import is_placed, is_together, whole_or_parts
from smp.activations.recompute import recompute
from smp.modules.forwards import WrapperKind, is_wrapped

_FUNCTION = "_gradient_checkpointing_func"
_FLAG = "gradient_checkpointing"
# Options of torch.utils.checkpoint.checkpoint.
_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug")


class TransformersCheckpointing:
    """The modules of a model that transformers may checkpoint.

    Args:
        root: the user's model.

    Attributes:
        modules: modules whose settings are honoured; their layers are among them.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = [module for module in root.modules() if hasattr(module, _FLAG)]
        self._layers = [module for module in self.modules if _is_layer(module)]
        self._settled: list[tuple[nn.Module, bool]] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def is_enabled(self) -> bool:
        """Returns whether any of the modules is to be checkpointed."""
        return any(getattr(module, _FLAG) for module in self.modules)

    @property
    def layers(self) -> list[nn.Module]:
        """Returns layers to checkpoint whose class shows that each is one checkpoint."""
        return [layer for layer in self._layers if getattr(layer, _FLAG)]

    def honour(self) -> None:
        """Replaces their function by ours; cheap where that has happened."""
        for module in self.modules:
            theirs = module.__dict__.get(_FUNCTION)
            if theirs is None or type(theirs) is _Checkpoint:
                continue
            plain = theirs.func if isinstance(theirs, functools.partial) else theirs
            if plain is torch.utils.checkpoint.checkpoint:  # the user may have set another one
                module.__dict__[_FUNCTION] = _Checkpoint(theirs)
        wanted = [(layer, is_placed(layer)) for layer in self.layers]
        if wanted != self._settled:
            self._settled = wanted
            self._settle()

    def _settle(self) -> None:
        """Checkpoints parts of the layers that lie on several partitions."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        for layer, _ in self._settled:
            for part in whole_or_parts([layer]):
                if part is not layer:  # whole layers checkpoint themselves
                    self._undo.append(wrap_call(part))


def _is_layer(module: nn.Module) -> bool:
    """Returns whether a module is a layer, by class name: importing transformers is forbidden."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


class _Checkpoint:
    """Runs a layer for transformers.

    Args:
        theirs: the function of transformers that this object replaces.
    """

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs
        options = theirs.keywords if isinstance(theirs, functools.partial) else {}
        self._preserve_rng_state = bool(options.get("preserve_rng_state", True))

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        preserve = bool(kwargs.get("preserve_rng_state", self._preserve_rng_state))
        inner, inner_args, inner_kwargs = _opened(function)
        given = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        inner_args, inner_kwargs = (*inner_args, *args), {**inner_kwargs, **given}
        module = _module_of(inner, inner_args)
        if module is None:
            return self._theirs(function, *args, **kwargs)
        if not is_together(module):
            return inner(*inner_args, **inner_kwargs)
        if isinstance(inner, types.FunctionType):
            # The forward of its class: the call has arrived where the module lives.
            if is_wrapped(module, WrapperKind.CHECKPOINT):
                return inner(*inner_args, **inner_kwargs)
            return recompute(
                inner, inner_args, inner_kwargs, preserve_rng_state=preserve, modules=(module,)
            )
        if getattr(module, "checkpoints_itself", False):
            return inner(*inner_args, **inner_kwargs)
        return checkpoint_call(module, inner, inner_args, inner_kwargs, preserve)


def _opened(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Takes a function and its arguments out of `functools.partial`, so that tensors are seen."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    return function, (), {}


def _module_of(function: Callable[..., Any], args: Iterable[Any]) -> nn.Module | None:
    """Returns the module that a function calls, or None if that cannot be found out."""
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None) if inspect.ismethod(function) else None
    if owner is None and isinstance(function, types.FunctionType):
        owner = next(iter(args), None)
        if not hasattr(type(owner), "forward"):
            return None
    return owner if isinstance(owner, nn.Module) else None
