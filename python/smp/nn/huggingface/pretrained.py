"""Which models came out of ``from_pretrained``, and whose weights are worth keeping."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

from torch import nn

_pretrained: WeakSet[nn.Module] = WeakSet()
_MARK = "_smp_notes_pretrained"


def watch(model_cls: type[Any]) -> None:
    """Notes what ``PreTrainedModel.from_pretrained`` returns from now on.

    Args:
        model_cls: that class.
    """
    original = vars(model_cls).get("from_pretrained")
    if original is None or _MARK in vars(model_cls):
        return
    function = original.__func__

    @functools.wraps(function)
    def from_pretrained(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        result = function(cls, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        if isinstance(model, nn.Module):
            _pretrained.update(model.modules())
        return result

    model_cls.from_pretrained = classmethod(from_pretrained)
    setattr(model_cls, _MARK, True)


def was_pretrained(module: nn.Module) -> bool:
    """Whether a module is part of a model that ``from_pretrained`` made."""
    return module in _pretrained


def was_initialised(module: nn.Module, model_cls: type[Any]) -> bool:
    """Whether the weights of a module are worth taking over.

    Scripts that train from scratch put a function that does nothing in the place of
    ``PreTrainedModel.init_weights``; weights are the defaults of PyTorch then.

    Args:
        module: of a Hugging Face model.
        model_cls: ``PreTrainedModel``.
    """
    init_weights = getattr(model_cls, "init_weights", None)
    is_original = getattr(init_weights, "__module__", "").startswith("transformers.")
    return was_pretrained(module) or is_original
