"""The description of a model family, and the ``__init__`` hooks made from it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from smp.nn.huggingface.fields import refuse_extra_outputs
from smp.nn.huggingface.translation import Names, Translator, layer_translators, translators
from smp.nn.transformer_layer import DistributedTransformerLayer
from smp.tensor_parallel.registry import Arguments, Declined, Unsupported

# head: with a language-modelling head; base: without one; stack: the layers of an encoder
Kind = Literal["head", "base", "stack", "layer"]
Options = dict[str, Any]

_LAYER_OPTIONS = frozenset(inspect.signature(DistributedTransformerLayer).parameters)
_HEAD_OPTIONS = ("tie_word_embedding", "lm_head_bias")


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        names: names of its parameters.
        modeling: module of transformers.
        classes: names of the classes that are replaced, by kind.
        outputs: names of the classes of results, by kind.
        options: function from a configuration to arguments of the distributed module; raises
            `Unsupported`.
        note: function that stores a configuration's facts for buffers in state dicts.
        rotates: layers take positions.
        layers_return_tuples: layers return tuples also in releases without ``output_attentions``.
    """

    names: Names
    modeling: str
    classes: Mapping[Kind, str]
    outputs: Mapping[Kind, str]
    options: Callable[[Any], Options]
    note: Callable[[Any], None]
    rotates: bool = False
    layers_return_tuples: bool = False

    def translators(self, kind: Kind) -> tuple[Translator, Translator]:
        """Returns translators of state dicts of models with replaced modules of this kind."""
        if kind == "layer":
            return layer_translators(self.names)
        return translators(self.names, prefer="base" if kind == "base" else "head")

    def init_hook(self, kind: Kind, module_cls: type[Any]) -> Callable[..., Arguments | Declined]:
        """Returns the hook of one class."""
        signature = inspect.signature(module_cls.__init__)

        def init_hook(*args: Any, **kwargs: Any) -> Arguments | Declined:
            given = signature.bind(None, *args, **kwargs).arguments
            config = given.get("config")
            if config is None:
                raise RuntimeError(
                    f"the arguments of {module_cls.__name__}.__init__ that were recorded have no "
                    f"configuration, only {sorted(given)}"
                )
            try:
                refuse_extra_outputs(config)
                options = self.options(config)
                number = given.get("layer_idx", given.get("layer_id"))
                result = _of_kind(kind, options, number)
            except Unsupported as reason:
                return Declined(str(reason))
            self.note(config)
            return (), result

        return init_hook

    def output_class(self, kind: Kind) -> type[Any]:
        """Returns the class of results in the installed release."""
        found: type[Any] = getattr(importlib.import_module(self.modeling), self.outputs[kind])
        return found


def _of_kind(kind: Kind, options: Options, number: int | None) -> Options:
    """Reduces the options of a whole model to those of a part of it."""
    if kind == "base":
        rest = {name: value for name, value in options.items() if name not in _HEAD_OPTIONS}
        return {**rest, "add_lm_head": False}
    if kind != "layer":
        return options
    windows = options.get("window_size")
    layer = {name: value for name, value in options.items() if name in _LAYER_OPTIONS}
    if isinstance(windows, Sequence):
        if number is None and len(set(windows)) > 1:
            raise Unsupported("the number of the layer is not known, and layers differ")
        layer["window_size"] = windows[number or 0]
    if number is None and options.get("scale_attn_by_layer_idx"):
        raise Unsupported("the number of the layer is not known, and layers differ")
    return {**layer, "layer_idx": number}


def decoder_classes(prefix: str, head: str, layer: str) -> dict[Kind, str]:
    """Returns the names of a decoder family's classes."""
    return {"head": prefix + head, "base": prefix + "Model", "layer": prefix + layer}
