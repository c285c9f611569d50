"""Adapters of PEFT in distributed models; the package is imported when it is needed."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

import smp._C as _C
from smp.model import DistributedModel, engine_of
from smp.tensor_parallel import partial
from smp.world import comm, runtime


def is_adapted(model: nn.Module) -> bool:
    """Returns whether a model is a ``PeftModel``."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def save_adapters(wrapped: DistributedModel, folder: str | os.PathLike[str]) -> None:
    """Writes the active adapter as ``PeftModel.save_pretrained`` does. Collective over all ranks.

    Only values of the adapter are gathered, and the first rank writes them.
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
    current, parts = runtime.current(), engine_of(wrapped).parts
    if parts is None:
        raise RuntimeError(
            f"{_C.rank_prefix()}smp.save_adapters: the model is not partitioned yet; call it after "
            "the first step"
        )
    current.wrapped.spread_written()
    parts.meet(current.rank, "smp.save_adapters", is_merged=True)
    name = f".{model.active_adapter}"
    own = {k: v for k, v in parts.marked_state().items() if k in partial.MARKS or name in k}
    whole = partial.merge(comm.allgather(own, comm.MP_GROUP))
    if current.rank.global_rank == 0:
        model.save_pretrained(folder, state_dict=whole)
    comm.barrier(comm.WORLD)


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
