"""Adapters of PEFT in distributed models; the package is imported when it is needed."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

from smp.model import DistributedModel


def is_adapted(model: nn.Module) -> bool:
    """Returns whether a model is a ``PeftModel``."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def load(wrapped: DistributedModel, model: Any, folder: str | os.PathLike[str]) -> None:
    """Loads the active adapter from a folder of ``save_pretrained``. Collective over all ranks.

    Args:
        wrapped: distributed model that holds `model`.
        model: a ``PeftModel``.
        folder: folder of ``adapter_model.safetensors``, or its parent if the folder has the
            adapter's name.
    """
    peft_utils = importlib.import_module("peft.utils")
    name = model.active_adapter
    inner = os.path.join(folder, name)
    state = peft_utils.load_peft_weights(
        inner if os.path.isdir(inner) else os.fspath(folder), device="cpu"
    )
    # Saved names leave out the name of the adapter.
    names = {
        key.replace(f".{name}", "", 1): key
        for key in model.state_dict(keep_vars=True)
        if f".{name}" in key
    }
    wrapped.load_state_dict({names[key]: value for key, value in state.items()}, strict=False)
