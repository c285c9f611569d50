"""``smp.quantize``: quantized layers in models of transformers, made part by part.

The packages are imported when they are needed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.checkpoint.huggingface import WeightFiles
from smp.initial.sources import set_source
from smp.modules import packed

#: function of a weight in full precision, which returns it in packed form, on the same device
_Quantize = Callable[[Tensor], nn.Parameter]

_PACKAGES = {"BitsAndBytesConfig": "bitsandbytes", "TorchAoConfig": "torchao"}


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
        ValueError: the model or the configuration is of another kind, the files lack a tensor, or
            a layer cannot be quantized like this.
        ImportError: the package of the configuration is missing.
        FileNotFoundError: the folder has no file with weights.
    """
    quantizer = _quantizer_of(model, config)
    origin = _Origin(model, None if weights is None else WeightFiles(Path(weights)))
    quantizer.preprocess_model(model, device_map=None)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    origin.check(names.values())
    for parameter, own in names.items():
        make = _method_of(model, quantizer, own[0], origin.sharing(own[0]), config)
        if make is None and not (parameter.is_meta and origin.has_values(own)):
            continue
        if origin.is_read_late(own):
            shown = origin.shown(own, make)
            set_source(shown, functools.partial(origin.take, own, make))
        else:
            shown = origin.take(own, make, origin.device_of(own))
        for name in own:
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._parameters[key] = shown
    origin.fill_buffers()
    model.hf_quantizer = quantizer  # the Trainer asks whether it can be trained
    return quantizer.postprocess_model(model)


class _Origin:
    """The values of a model in full precision: parameters that it has, and files.

    Args:
        model: the model, before layers are replaced.
        files: files with the values of parameters on the meta device, or None.
    """

    def __init__(self, model: Any, files: WeightFiles | None) -> None:
        self._parameters: dict[str, nn.Parameter] = dict(
            model.named_parameters(remove_duplicate=False)
        )
        self._transposed = {
            f"{name}.weight" for name, m in model.named_modules() if type(m).__name__ == "Conv1D"
        }
        if files is not None and not any(p.is_meta for p in self._parameters.values()):
            raise ValueError(
                f"{_C.rank_prefix()}smp.quantize: weights={str(files.path)!r} is for a model on "
                "the meta device, and this one has values, which would be quantized instead; make "
                "it inside smp.delay_param_initialization(), or leave weights out"
            )
        self._buffers = [] if files is None else list(_saved_buffers(model))
        self._files = files
        self._base = f"{model.base_model_prefix}."

    def sharing(self, name: str) -> list[str]:
        """Returns the names of modules that had the same parameter, `name` included."""
        held = self._parameters[name]
        return [other for other, parameter in self._parameters.items() if parameter is held]

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
        missing += [name for name, _, _ in self._buffers if self._file_key([name]) is None]
        if not missing:
            return
        raise ValueError(
            f"{_C.rank_prefix()}smp.quantize: {self._files.path} lacks {len(missing)} tensors of "
            f"the model, '{missing[0]}' for one; expected the names of the model's state dict, and "
            f"there are {len(self._files)} tensors. If transformers renames or merges tensors of "
            "this model while it loads them, write the loaded model by save_pretrained, and pass "
            "that folder"
        )

    def shown(self, names: list[str], make: _Quantize | None) -> nn.Parameter:
        """Returns the parameter on the meta device, in the form that it has with values."""
        held = self._parameters[names[0]]
        if make is None:
            empty = torch.empty(held.shape, dtype=held.dtype, device="meta")
            return nn.Parameter(empty, held.requires_grad)
        return make(self._turned(names, held.detach()))

    def take(self, names: list[str], make: _Quantize | None, device: torch.device) -> nn.Parameter:
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
        self._check_shape(names[0], value, held)
        for name in names:
            self._parameters[name] = nn.Parameter(held.detach().to("meta"), held.requires_grad)
        if make is None:
            return nn.Parameter(value.to(device, held.dtype, copy=True), held.requires_grad)
        return make(self._turned(names, value.to(device, held.dtype)))

    def fill_buffers(self) -> None:
        """Reads the buffers of a model whose values are in files; parameters are read later."""
        for name, module, key in self._buffers:
            found, held = self._file_key([name]), module._buffers[key]
            assert self._files is not None and found is not None and held is not None
            value = self._files.read(found).to(held.dtype, copy=True)
            self._check_shape(name, value, held)
            if held.is_meta:
                module._buffers[key] = value
            else:
                held.copy_(value)

    def _check_shape(self, name: str, value: Tensor, held: Tensor) -> None:
        if value.shape != held.shape:
            raise ValueError(
                f"{_C.rank_prefix()}smp.quantize: '{name}' has shape {tuple(value.shape)} in the "
                f"files, and {tuple(held.shape)} in the model"
            )

    def _turned(self, names: list[str], value: Tensor) -> Tensor:
        """Returns a weight with features that come out as rows."""
        return value.T.contiguous() if names[0] in self._transposed else value

    def _key(self, names: list[str]) -> str | None:
        """Returns the name in the files, which may be those of the model without its head."""
        return self._file_key(names) if self.is_read_late(names) else None

    def _file_key(self, names: list[str]) -> str | None:
        if self._files is None:
            return None
        further = [f"{self._base}{name}" for name in names]
        further += [name.removeprefix(self._base) for name in names]
        return next((key for key in (*names, *further) if key in self._files), None)


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields the buffers of a model that state dicts have: name, module, and its name there."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, module, key


def _quantizer_of(model: Any, config: Any) -> Any:
    """Returns the quantizer of transformers.

    Raises:
        ValueError: something is of another kind.
        ImportError: its package is missing.
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
    if importlib.util.find_spec(_PACKAGES[kind]) is None:
        raise ImportError(
            f"{_C.rank_prefix()}smp.quantize: {kind} needs the package {_PACKAGES[kind]}, which is "
            "not installed"
        )
    auto = importlib.import_module("transformers.quantizers.auto")
    return auto.AutoHfQuantizer.from_config(config, pre_quantized=False)


def _method_of(
    model: Any, quantizer: Any, name: str, tied: list[str], config: Any
) -> _Quantize | None:
    """Returns the function that quantizes a parameter, or None if it stays whole.

    Args:
        model: model whose layers are replaced.
        quantizer: quantizer of transformers.
        name: name of the parameter.
        tied: all names that the parameter had before layers were replaced.
        config: configuration of the user.

    Raises:
        ValueError: it is the weight of a layer to be quantized, and of another one.
    """
    if not quantizer.param_needs_quantization(model, name):
        return None
    other = next((n for n in tied if not quantizer.param_needs_quantization(model, n)), None)
    if other is not None:
        raise ValueError(
            f"{_C.rank_prefix()}smp.quantize: '{name}' cannot be quantized, because it is the "
            f"same parameter as '{other}', whose module computes in full precision; leave the "
            "layer out (llm_int8_skip_modules of BitsAndBytesConfig, modules_to_not_convert of "
            "TorchAoConfig)"
        )
    layer = model.get_submodule(name.rpartition(".")[0])
    if type(config).__name__ == "TorchAoConfig":
        method = config.get_apply_tensor_subclass()
        return functools.partial(
            _made, name, type(method).__name__, functools.partial(_by_torchao, method)
        )
    options: Mapping[str, Any] = {
        key: value for key, value in layer.weight.__dict__.items() if key in _OPTIONS
    }
    make = functools.partial(_by_bitsandbytes, type(layer.weight), layer, options)
    return functools.partial(_made, name, type(layer).__name__, make)


def _made(name: str, method: object, make: _Quantize, value: Tensor) -> nn.Parameter:
    """Returns a quantized weight.

    Raises:
        ValueError: the method cannot pack this weight, or leaves it as it is.
    """
    problem, cause = "it is left in full precision", None
    try:
        made = make(value)
        if packed.is_packed(made):
            return made
    except Exception as error:  # each package and packing has its own
        problem, cause = f"{type(error).__name__}: {error}", error
    raise ValueError(
        f"{_C.rank_prefix()}smp.quantize: '{name}' of shape {tuple(value.shape)} cannot be "
        f"quantized on {value.device.type} by {method}: {problem}. Choose sizes or a packing that "
        "fit, or leave the layer out (llm_int8_skip_modules of BitsAndBytesConfig, "
        "modules_to_not_convert of TorchAoConfig)"
    ) from cause


_OPTIONS = (
    "blocksize", "compress_statistics", "quant_type", "quant_storage", "has_fp16_weights",
)  # fmt: skip


def _by_bitsandbytes(
    kind: Any, layer: nn.Module, options: Mapping[str, Any], value: Tensor
) -> nn.Parameter:
    own = {"module": layer} if "quant_type" in options else {}
    made: Any = kind(value.contiguous(), requires_grad=False, **options, **own)
    with torch.device("cpu"):  # where tables are made; a model of a plan is made on the meta device
        if value.is_meta:
            # bitsandbytes keeps a table of the first device that it quantizes on, for all others.
            importlib.import_module("bitsandbytes.functional").quantize_blockwise(torch.zeros(1))
        made = made._quantize(value.device)
    if value.is_meta:
        made.__deepcopy__ = functools.partial(_copied, made)
        state = getattr(made, "quant_state", None)
        if state is not None and state.offset is not None:
            state.offset = torch.zeros((), device="cpu")  # state dicts read the number
    packed_weight: nn.Parameter = made
    return packed_weight


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
