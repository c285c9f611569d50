"""Masks that some ranks need and others do not, in blocks that compute the samples of all."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from smp.tensor_parallel import regions

_SKIPS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_PATCHED = "_smp_agrees"


class _Models(threading.local):
    """A counter of the forwards of models with own batches that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0


_models = _Models()


def agree_on_masks(root: nn.Module) -> None:
    """Makes transformers leave out a mask only where all ranks of a group do.

    It leaves out a mask that masks nothing in a rank's samples. Blocks compute the samples of all
    ranks together, so if one rank needs its mask, all need one.

    Args:
        root: module whose models of transformers agree from now on, each time they are called.
    """
    models = sys.modules.get("transformers.modeling_utils")
    masking = sys.modules.get("transformers.masking_utils")
    model_cls = getattr(models, "PreTrainedModel", None)
    if model_cls is None or masking is None:
        return
    for name in _SKIPS:
        skip = getattr(masking, name, None)
        if skip is not None and not hasattr(skip, _PATCHED):
            setattr(masking, name, _agreeing(skip))
    for module in root.modules():
        if isinstance(module, model_cls) and "forward" not in module.__dict__:
            # A bound method, so that a deep copy has its own.
            module.__dict__["forward"] = types.MethodType(_counted(type(module).forward), module)


def _agreeing(skip: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(skip)
    def agree(*args: Any, **kwargs: Any) -> bool:
        own = skip(*args, **kwargs)
        if _models.depth == 0:
            return own
        return regions.all_say(bool(own), "masks that say nothing")

    setattr(agree, _PATCHED, True)
    return agree


def _counted(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _models.depth += 1
        try:
            return forward(self, *args, **kwargs)
        finally:
            _models.depth -= 1

    return run
