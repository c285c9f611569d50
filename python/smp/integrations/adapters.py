"""Adapters of PEFT in distributed models; the package is imported when it is needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

import smp._C as _C
from smp.model import DistributedModel
from smp.tensor_parallel import partial
from smp.world import comm


def is_adapted(model: nn.Module) -> bool:
    """Returns whether a model is a ``PeftModel``."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def save_adapters(wrapped: DistributedModel, folder: str | os.PathLike[str]) -> None:
    """Writes the active adapter as ``PeftModel.save_pretrained`` does. Collective over all ranks.

    Values of the adapter and trained ones are gathered, and the first rank writes those that the
    adapter's configuration asks for. Frozen embeddings are not written.
    ``PeftModel.from_pretrained`` reads the folder, beside a base model in any precision.

    Args:
        wrapped: partitioned model that holds a ``PeftModel``.
        folder: folder, which is made.

    Raises:
        ValueError: the model has no adapters.
        RuntimeError: the model is not partitioned yet.
    """
    model: Any = wrapped.get_module()
    if not is_adapted(model):
        raise ValueError(
            f"{_C.rank_prefix()}smp.save_adapters: expected a model of PEFT, got "
            f"{type(model).__name__}; use smp.save_checkpoint"
        )
    adapter = model.active_adapter
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    own = {
        key: value
        for key, value in wrapped.local_state_dict().items()
        if key in partial.MARKS or key in trained or f".{adapter}" in key
    }
    whole = partial.merge(comm.allgather(own, comm.MP_GROUP))
    if comm.rank() == 0:
        with _naming_placeholders(model, adapter):
            model.save_pretrained(
                folder, state_dict=whole, selected_adapters=[adapter], save_embedding_layers=False
            )
    comm.barrier(comm.WORLD)


@contextlib.contextmanager
def _naming_placeholders(model: nn.Module, adapter: str) -> Iterator[None]:
    """Lets PEFT read the names of modules that an adapter trains whole, also of other ranks.

    It asks their ``state_dict()`` for names only, which placeholders refuse.
    """
    copies = (module._modules.get("modules_to_save") for module in model.modules())
    trained = [
        copy[adapter] for copy in copies if isinstance(copy, nn.ModuleDict) and adapter in copy
    ]
    for module in trained:
        module.__dict__["state_dict"] = functools.partial(module.state_dict, keep_vars=True)
    try:
        yield
    finally:
        for module in trained:
            del module.__dict__["state_dict"]


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
