"""Registration of the families whose classes are imported; it never imports transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from smp.nn.conv1d import DistributedConv1D, arguments_of_conv1d, conv1d_class
from smp.nn.huggingface import (
    bert,
    gpt2,
    gptj,
    gptneo,
    gptneox,
    pretrained,
    roberta,
)
from smp.nn.huggingface.adapters import adapter_maker
from smp.nn.huggingface.family import Family, Kind
from smp.nn.lm_head import DistributedTransformerLMHead
from smp.nn.transformer import DistributedTransformer
from smp.nn.transformer_layer import DistributedTransformerLayer
from smp.tensor_parallel.registry import Arguments, Registration, is_registered, register

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY for module in (gpt2, gptj, gptneo, gptneox, bert, roberta)
)
_DISTRIBUTED: Mapping[Kind, type[nn.Module]] = {
    "head": DistributedTransformerLMHead,
    "base": DistributedTransformerLMHead,
    "stack": DistributedTransformer,
    "layer": DistributedTransformerLayer,
}


def register_available(modules: Mapping[str, ModuleType | None] | None = None) -> None:
    """Registers the families whose transformers modules are imported already.

    A class that is registered keeps its registration, so users may register a replacement first.

    Args:
        modules: imported modules by name; ``sys.modules`` if not given.
    """
    imported = sys.modules if modules is None else modules
    models = imported.get("transformers.modeling_utils")
    model_cls = getattr(models, "PreTrainedModel", None)
    if model_cls is None:  # not imported, or being imported just now
        return
    pretrained.watch(model_cls)
    conv1d = conv1d_class()
    if conv1d is not None and not is_registered(conv1d):
        register(Registration(conv1d, DistributedConv1D, arguments_of=arguments_of_conv1d))
    for family in FAMILIES:
        modeling = imported.get(family.modeling)
        for kind, name in family.classes.items():
            module_cls = getattr(modeling, name, None)
            if module_cls is not None and not is_registered(module_cls):
                register(_registration(family, kind, module_cls))


def _registration(family: Family, kind: Kind, module_cls: type[nn.Module]) -> Registration:
    return Registration(
        module_cls,
        _DISTRIBUTED[kind],
        init_hook=family.init_hook(kind, module_cls),
        adapter=adapter_maker(family, kind, module_cls),
        translators=family.translators(kind),
        # Models and encoders have their only argument as an attribute.
        arguments_of=None if kind == "layer" else _configuration_of,
        deduced_from=_deducer(family, module_cls) if kind == "layer" else None,
        problem_in=_problem_in if kind in ("head", "base") else None,
        was_initialised=pretrained.was_initialised,
        family=family.names.family,
    )


def _configuration_of(module: nn.Module) -> Arguments:
    return (module.config,), {}


def _problem_in(module: Any, around: Sequence[nn.Module]) -> str | None:
    """Returns why a model inside a model of several, as of images and text, cannot be replaced.

    Outer models read the word embedding and pass embeddings of their own, which the distributed
    form of a whole model does not take. Layers get the same inputs, so they can be replaced.
    """
    for outer in around:
        config = getattr(outer, "config", None)
        if hasattr(config, "model_type") and type(config) is not type(module.config):
            return (
                f"the {type(outer).__name__} around it gives it embeddings, which its distributed "
                "form does not take; its layers may be distributed"
            )
    return None


def _deducer(
    family: Family, layer_cls: type[nn.Module]
) -> Callable[[nn.Module, Sequence[nn.Module]], Arguments | None]:
    """Returns a function that deduces a layer's arguments if they were not recorded.

    transformers imports the modules of its models when the first one is made, so layers of that one
    come before their class is registered.
    """
    takes = inspect.signature(layer_cls.__init__).parameters
    names = [name for name in ("layer_idx", "layer_id") if name in takes]

    def deduce(layer: nn.Module, around: Sequence[nn.Module]) -> Arguments | None:
        parts = list(layer.modules())
        # In older releases only models have their configuration; layers do not.
        configs = (getattr(module, "config", None) for module in (*parts, *around))
        config = next((c for c in configs if _is_of_family(c, family)), None)
        if config is None:
            return None
        # If layers differ, attention stores the number; the place in a list may have changed.
        numbers = (getattr(part, name, None) for part in parts for name in names)
        number = next((n for n in numbers if isinstance(n, int)), None)
        return (), {"config": config, **dict.fromkeys(names, number)}

    return deduce


def _is_of_family(config: Any, family: Family) -> bool:
    kinds = (vars(cls).get("model_type") for cls in type(config).__mro__)
    return family.names.family in kinds
