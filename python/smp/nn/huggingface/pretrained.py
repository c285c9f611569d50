"""A record of the modules that ``from_pretrained`` made and of those with weights worth keeping."""

from __future__ import annotations

import functools
import sys
from typing import Any
from weakref import WeakSet

from torch import nn

_pretrained: WeakSet[nn.Module] = WeakSet()
_bare: WeakSet[nn.Module] = WeakSet()  # made while initialisation was switched off
_loaded: WeakSet[nn.Module] = WeakSet()  # members of _bare that a state dict gave values
_MARK = "_smp_notes_pretrained"


def watch(model_cls: type[Any]) -> None:
    """Wraps methods of the class so that new and loaded models are recorded.

    Models made earlier, or in a ``from_pretrained`` that runs already, count as initialised.

    Args:
        model_cls: ``PreTrainedModel``.
    """
    if "from_pretrained" not in vars(model_cls) or _MARK in vars(model_cls):
        return
    model_cls.from_pretrained = _noting_what_comes(vars(model_cls)["from_pretrained"])
    if "post_init" in vars(model_cls):
        model_cls.post_init = _noting_what_is_made(vars(model_cls)["post_init"], model_cls)
    setattr(model_cls, _MARK, True)


def _noting_what_comes(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def from_pretrained(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        result = function(cls, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        if isinstance(model, nn.Module):
            _pretrained.update(model.modules())
        return result

    return classmethod(from_pretrained)


def _noting_what_is_made(function: Any, model_cls: type[Any]) -> Any:
    @functools.wraps(function)
    def post_init(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)  # calls init_weights, as every model does once
        initialises = _initialises(model_cls)
        for module in self.modules():
            if initialises:
                _bare.discard(module)
            elif module not in _bare:
                _bare.add(module)
                module.register_load_state_dict_post_hook(_note_load)
        return result

    return post_init


def _initialises(model_cls: type[Any]) -> bool:
    """Returns whether new models get initial values of Hugging Face.

    Scripts that train from scratch, and ``no_init_weights`` of releases since 5, replace
    ``PreTrainedModel.init_weights`` by a function that does nothing. ``no_init_weights`` of older
    releases switches ``init_weights`` off by a variable of its module.
    """
    name = getattr(model_cls.init_weights, "__qualname__", "")
    is_on = getattr(sys.modules.get(model_cls.__module__), "_init_weights", True)
    return name == f"{model_cls.__qualname__}.init_weights" and bool(is_on)


def _note_load(module: nn.Module, _: Any) -> None:
    _loaded.add(module)


def was_pretrained(module: nn.Module) -> bool:
    """Returns whether a module is part of a model that ``from_pretrained`` made."""
    return module in _pretrained


def was_initialised(module: nn.Module) -> bool:
    """Returns whether the weights of a module are worth copying to its replacement.

    They are not if initialisation was off when the module was made, and neither
    ``from_pretrained`` nor ``load_state_dict`` has given any part of it values since.

    Args:
        module: module of a Hugging Face model.
    """
    if module not in _bare:
        return True
    return any(part in _pretrained or part in _loaded for part in module.modules())
