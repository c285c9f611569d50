"""``smp.quantize``: quantized layers in models of transformers, made part by part.

The packages are imported when they are needed.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.checkpoint.huggingface import Weights
from smp.initial.sources import set_source
from smp.modules import packed

#: function of a weight in full precision, which returns it in packed form, on the same device
_Quantize = Callable[[Tensor], nn.Parameter]


def quantize(model: Any, config: Any, weights: str | os.PathLike[str] | None = None) -> Any:
    """Quantizes layers of a model, as ``from_pretrained(quantization_config=config)`` does.

    A model on the meta device (made in :func:`smp.delay_param_initialization`) gets its values from
    files. When the model is partitioned, each rank reads and quantizes the layers that it owns, one
    at a time, so no rank has the model in full precision, or the parts of others. Layers of a model
    with values are quantized at once. Not collective; all ranks do the same.

    Args:
        model: a ``PreTrainedModel``, before adapters are added.
        config: ``BitsAndBytesConfig`` (4 or 8 bits) or ``TorchAoConfig`` (of weights only).
        weights: folder with files of the model in full precision (safetensors or PyTorch's, with or
            without an index), or one file; None for a model with values, or for `smp estimate`.

    Returns:
        The model, in which layers may have been replaced.

    Raises:
        ValueError: the model or the configuration is of another kind, or the files lack a tensor.
        FileNotFoundError: the folder has no file with weights.
    """
    quantizer = _quantizer_of(model, config)
    origin = _Origin(model, None if weights is None else Weights(Path(weights)))
    quantizer.preprocess_model(model, device_map=None)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    origin.check(names.values())
    for parameter, own in names.items():
        make = None
        if quantizer.param_needs_quantization(model, own[0]):
            make = _method_of(model, own[0], config)
        elif not parameter.is_meta or not origin.has_values(own):
            continue
        if origin.is_read_late(own):
            shown = origin.shown(own, make)
            set_source(shown, functools.partial(origin.take, own, make))
        else:
            shown = origin.take(own, make, origin.device_of(own))
        for name in own:
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._parameters[key] = shown
    return quantizer.postprocess_model(model)


class _Origin:
    """The values of a model in full precision: parameters that it has, and files.

    Args:
        model: the model, before layers are replaced.
        files: files with the values of parameters on the meta device, or None.
    """

    def __init__(self, model: Any, files: Weights | None) -> None:
        self._parameters: dict[str, nn.Parameter] = dict(
            model.named_parameters(remove_duplicate=False)
        )
        self._transposed = {
            f"{name}.weight" for name, m in model.named_modules() if type(m).__name__ == "Conv1D"
        }
        self._files = files
        self._base = f"{model.base_model_prefix}."

    def is_read_late(self, names: list[str]) -> bool:
        """Returns whether a parameter, given by its names, is on the meta device."""
        return self._parameters[names[0]].is_meta

    def has_values(self, names: list[str]) -> bool:
        """Returns whether there are values for a parameter that is not quantized."""
        return self._files is not None or not self.is_read_late(names)

    def device_of(self, names: list[str]) -> torch.device:
        return self._parameters[names[0]].device

    def check(self, all_names: Any) -> None:
        """Raises a ValueError if the files lack a value."""
        if self._files is None:
            return  # it is enough for `smp estimate`
        missing = [n[0] for n in all_names if self.is_read_late(n) and self._key(n) is None]
        if not missing:
            return
        raise ValueError(
            f"{_C.rank_prefix()}smp.quantize: {self._files.path} lacks {len(missing)} of the "
            f"model's parameters, '{missing[0]}' for one; expected the names of the model's state "
            f"dict, there are {len(self._files)} tensors. If transformers renames or merges tensors "
            "of this model while it loads them, write the loaded model by save_pretrained, and "
            "pass that folder"
        )

    def shown(self, names: list[str], make: _Quantize | None) -> nn.Parameter:
        """Returns the parameter on the meta device, in the form that it has with values."""
        held = self._parameters[names[0]]
        if make is None:
            empty = torch.empty(held.shape, dtype=held.dtype, device="meta")
            return nn.Parameter(empty, held.requires_grad)
        return make(self._turned(names, held.detach()))

    def take(
        self, names: list[str], make: _Quantize | None, device: torch.device
    ) -> nn.Parameter:
        """Returns the parameter with values, which are dropped here."""
        held = self._parameters[names[0]]
        value: Tensor = held.detach()
        if self._files is None and held.is_meta:
            raise ValueError(
                f"{_C.rank_prefix()}smp.quantize: '{names[0]}' is on the meta device and has no "
                "values to quantize; pass weights=, the folder of the model in full precision, or "
                "a model with values"
            )
        key = self._key(names)
        if key is not None:
            assert self._files is not None
            value = self._files.read(key)
        if value.shape != held.shape:
            raise ValueError(
                f"{_C.rank_prefix()}smp.quantize: '{names[0]}' has shape {tuple(value.shape)} in "
                f"the files, and {tuple(held.shape)} in the model"
            )
        for name in names:
            self._parameters[name] = nn.Parameter(held.detach().to("meta"), held.requires_grad)
        if make is None:
            return nn.Parameter(value.to(device, held.dtype, copy=True), held.requires_grad)
        return make(self._turned(names, value.to(device, held.dtype)))

    def _turned(self, names: list[str], value: Tensor) -> Tensor:
        """Returns a weight with features that come out as rows."""
        return value.T.contiguous() if names[0] in self._transposed else value

    def _key(self, names: list[str]) -> str | None:
        """Returns the name in the files, which may be those of the model without its head."""
        if self._files is None or not self.is_read_late(names):
            return None
        further = [f"{self._base}{name}" for name in names]
        further += [name.removeprefix(self._base) for name in names]
        return next((key for key in (*names, *further) if key in self._files), None)


def _quantizer_of(model: Any, config: Any) -> Any:
    """Returns the quantizer of transformers.

    Raises:
        ValueError: something is of another kind.
    """
    if not hasattr(model, "base_model_prefix") or hasattr(model, "peft_config"):
        raise ValueError(
            f"{_C.rank_prefix()}smp.quantize: expected a PreTrainedModel without adapters, got "
            f"{type(model).__name__}; add adapters to what it returns. Layers of other models are "
            "made by the script (bitsandbytes.nn.Linear4bit, torchao.quantize_)"
        )
    kind = type(config).__name__
    problem = None
    if kind == "BitsAndBytesConfig":
        if config.load_in_8bit and config.llm_int8_has_fp16_weight:
            problem = "llm_int8_has_fp16_weight keeps weights in 16 bits"
        elif not (config.load_in_8bit or config.load_in_4bit):
            problem = "it has neither load_in_4bit nor load_in_8bit"
    elif kind == "TorchAoConfig":
        name = type(config.quant_type).__name__
        if "WeightOnly" not in name:
            problem = f"{name} quantizes more than weights, or none"
        elif config.include_input_output_embeddings:
            problem = "include_input_output_embeddings quantizes more than linear layers"
    else:
        problem = "it is of another kind"
    if problem is not None:
        raise ValueError(
            f"{_C.rank_prefix()}smp.quantize: {kind} cannot be used, because {problem}; expected "
            "BitsAndBytesConfig(load_in_4bit=True or load_in_8bit=True), or TorchAoConfig of a "
            "configuration for weights only, such as Int8WeightOnlyConfig()"
        )
    auto = importlib.import_module("transformers.quantizers.auto")
    return auto.AutoHfQuantizer.from_config(config, pre_quantized=False)


def _method_of(model: Any, name: str, config: Any) -> _Quantize:
    """Returns the function that quantizes a layer's weight."""
    layer = model.get_submodule(name.rpartition(".")[0])
    if type(config).__name__ == "TorchAoConfig":
        return functools.partial(_by_torchao, config.get_apply_tensor_subclass())
    options: Mapping[str, Any] = {
        key: value for key, value in layer.weight.__dict__.items() if key in _OPTIONS
    }
    return functools.partial(_by_bitsandbytes, type(layer.weight), layer, options)


_OPTIONS = (
    "blocksize", "compress_statistics", "quant_type", "quant_storage", "has_fp16_weights",
)  # fmt: skip


def _by_bitsandbytes(
    kind: Any, layer: nn.Module, options: Mapping[str, Any], value: Tensor
) -> nn.Parameter:
    own = {"module": layer} if "quant_type" in options else {}
    made: Any = kind(value.contiguous(), requires_grad=False, **options, **own)
    if value.is_meta:
        # bitsandbytes keeps a table of the first device that it quantizes on, for all others.
        importlib.import_module("bitsandbytes.functional").quantize_blockwise(torch.zeros(1))
    made = made._quantize(value.device)
    if value.is_meta:
        made.__deepcopy__ = functools.partial(_copied, made)
        state = getattr(made, "quant_state", None)
        if state is not None and state.offset is not None:
            state.offset = torch.zeros(())  # state dicts read the number
    return made


def _copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copies a parameter on the meta device, which its own class cannot (PEFT does for DoRA)."""
    copied: nn.Parameter = packed.mapped(parameter, lambda _, part: torch.empty_like(part))
    return copied


def _by_torchao(config: Any, value: Tensor) -> nn.Parameter:
    quantize_ = importlib.import_module("torchao.quantization").quantize_
    layer = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(value, requires_grad=False)
    quantize_(layer, config, filter_fn=lambda *_: True)
    return layer.weight
