"""Adapters of PEFT in distributed models; the package is imported when it is needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


# ---- adapters of a model that is served ------------------------------------------------

_PREFIX = "base_model.model."
_WRAPPED = ("base_layer", "original_module")


def layers_in(model: Any) -> dict[str, Any]:
    """Returns the modules that PEFT has put around others, by their names."""
    kinds = tuple(
        getattr(importlib.import_module(place), name)
        for place, name in (
            ("peft.tuners.tuners_utils", "BaseTunerLayer"),
            ("peft.utils.other", "AuxiliaryTrainingWrapper"),
        )
    )
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


@dataclass(frozen=True)
class Names:
    """Names of an adapted model's tensors in files, by key of its state dict.

    Attributes:
        base: names in the model before adapters were added.
        own: names of the active adapter's tensors in PEFT's files.
        trained: names, in the model before, of copies that the adapter trains whole.
    """

    base: dict[str, str]
    own: dict[str, str]
    trained: dict[str, str]


def names_in(model: Any, state: Mapping[str, Tensor]) -> Names:
    """Returns the names of the tensors of a ``PeftModel`` in files.

    Args:
        model: the model.
        state: state dict of the model.
    """
    adapter = model.active_adapter
    layers = layers_in(model)
    found = Names({}, {}, {})
    for key in state:
        path, kind, rest = _around(key, layers)
        own, _, rest_of_own = rest.partition(".")
        if kind in _WRAPPED:
            found.base[key] = f"{path}.{rest}".removeprefix(_PREFIX)
        elif kind == "":
            found.base[key] = key.removeprefix(_PREFIX)
        elif own == adapter and kind == "modules_to_save":
            found.own[key] = f"{path}.{rest_of_own}"
            found.trained[key] = found.own[key].removeprefix(_PREFIX)
        elif own == adapter:
            found.own[key] = ".".join(filter(None, (path, kind, rest_of_own)))
    return found


def _around(key: str, layers: Mapping[str, nn.Module]) -> tuple[str, str, str]:
    """Returns the adapted layer of a key, its attribute, and the rest; empty texts for others."""
    words = key.split(".")
    for end in range(len(words) - 1, 0, -1):
        path = ".".join(words[:end])
        if path in layers:
            kind = words[end]
            known: tuple[str, ...] = layers[path].adapter_layer_names  # type: ignore[assignment]
            if kind in (*known, *_WRAPPED):
                return path, kind, ".".join(words[end + 1 :])
    return "", "", ""


def merges(model: Any) -> dict[str, Any]:
    """Returns the layers with a weight that the active adapter changes, by the key of the weight.

    Raises:
        ValueError: an adapter is of a kind that is not merged here; the text names its layer.
    """
    lora = importlib.import_module("peft.tuners.lora.layer")
    whole = importlib.import_module("peft.utils.other").ModulesToSaveWrapper
    adapter = model.active_adapter
    found = {}
    for path, layer in layers_in(model).items():
        if isinstance(layer, whole):
            continue
        problem = None
        if getattr(type(layer), "merge", None) not in (lora.Linear.merge, lora.Embedding.merge):
            problem = f"is a {type(layer).__name__}"
        elif layer.merged:
            problem = "is merged already"
        elif list(layer.active_adapters) != [adapter]:
            problem = f"has the active adapters {list(layer.active_adapters)}"
        elif layer.lora_variant.get(adapter) is not None or layer.lora_bias.get(adapter):
            problem = "is of a variant (DoRA, lora_bias)"
        if problem is not None:
            raise ValueError(
                f"{_C.rank_prefix()}the adapter of '{path}' {problem}; expected LoRA of a linear "
                'layer or embedding. Send it beside the base model (adapters="kept")'
            )
        if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
            found[f"{path}.base_layer.weight"] = layer
    return found


def inputs_of(key: str, layer: Any, adapter: str) -> tuple[str, str]:
    """Returns the keys of an adapter's two matrices, by the key of the weight that they change."""
    path = key.removesuffix(".base_layer.weight")
    if adapter in layer.lora_A:
        return f"{path}.lora_A.{adapter}.weight", f"{path}.lora_B.{adapter}.weight"
    return f"{path}.lora_embedding_A.{adapter}", f"{path}.lora_embedding_B.{adapter}"


def merged(weight: Tensor, first: Tensor, second: Tensor, layer: Any, adapter: str) -> Tensor:
    """Returns a weight with its adapter added, as ``merge_and_unload`` of PEFT computes it.

    Args:
        weight: weight of the base layer.
        first, second: matrices of the adapter.
        layer: LoRA layer of PEFT, which has the scaling.
        adapter: name of the adapter.
    """
    dtype = second.dtype
    if dtype in (torch.float16, torch.bfloat16):
        first, second = first.float(), second.float()
    product = second @ first
    if adapter not in layer.lora_A or layer.fan_in_fan_out:
        product = product.T
    added: Tensor = (product * layer.scaling[adapter]).to(dtype)
    return weight + added.to(weight.dtype)
