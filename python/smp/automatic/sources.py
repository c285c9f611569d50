"""Models that a run can be made of: a folder or name of Hugging Face, a function, or a module."""

from __future__ import annotations

import copy
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smp.checkpoint.huggingface import CONFIG, find_weights, open_weights
from smp.checkpoint.loading import resume_from_checkpoint
from smp.checkpoint.whole_files import Renaming
from smp.commands.ending import BadUse
from smp.commands.models import LoadedModel, load_huggingface, made_by, split_made, with_call
from smp.initial.initialise import await_values
from smp.model import DistributedModel
from smp.modules import packed
from smp.replacement import model_creation
from smp.world.log import first_rank_log

_PATTERNS = ("*.json", "*.safetensors")


class Source(ABC):
    """A model from which a run is made.

    Attributes:
        name: name for messages and files.
        delays: parameters are made where they are needed, and loaded then.
    """

    name: str
    delays: bool

    @abstractmethod
    def check(self) -> None:
        """Checks that the model is there, and fetches its files to this host if needed.

        Raises:
            ValueError: it is not.
        """

    @abstractmethod
    def traced(self) -> LoadedModel:
        """Returns a new model on the meta device, for a plan."""

    @abstractmethod
    def make(self, dtype: torch.dtype) -> nn.Module:
        """Returns the model of the run; parameters have no memory if `delays`."""

    @abstractmethod
    def load(self, model: DistributedModel) -> None:
        """Gives each rank the values of its part, once it has it. Collective."""


class Pretrained(Source):
    """A model of Hugging Face in a folder, or in its cache."""

    delays = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = Path(name)

    def check(self) -> None:
        if not self._folder.is_dir():
            self._folder = _fetched(self.name)
        if not (self._folder / CONFIG).is_file():
            raise ValueError(f"no model {self.name!r}: {self._folder} has no {CONFIG}")
        settings = json.loads((self._folder / CONFIG).read_text(encoding="utf-8"))
        quantized = settings.get("quantization_config")
        if quantized:
            method = quantized.get("quant_method", "unknown")
            raise ValueError(
                f"model {self.name!r} is stored quantized (quant_method {method!r}), and smp.auto "
                "loads weights of floating point; give the model that it was made of, or a "
                "function that quantizes that one by smp.quantize"
            )
        try:
            names = [*open_weights(find_weights(self._folder, None))]
            module: Any = self.traced().module
        except FileNotFoundError as error:
            raise ValueError(f"no weights of {self.name!r}: {error}") from None
        except BadUse as error:
            raise ValueError(str(error)) from None
        self._class, self._config = type(module), module.config
        self._renaming = _renaming(self.name, module, names)

    def traced(self) -> LoadedModel:
        found = load_huggingface(str(self._folder))
        return LoadedModel(self.name, found.module, found.call, found.trained)

    def make(self, dtype: torch.dtype) -> nn.Module:
        with model_creation(dtype=dtype):
            made: nn.Module = self._class(self._config)
        await_values(made)
        return made.train()

    def load(self, model: DistributedModel) -> None:
        resume_from_checkpoint(
            self._folder,
            partial=False,
            load_optimizer=False,
            model=model,
            translate_function=self._renaming,
        )


class Made(Source):
    """A model that a function makes: an adapted or quantized one, or one of the script's own.

    Parameters have no memory until they are drawn, or read by `smp.quantize`, where they belong.

    Args:
        function: function that takes no arguments and returns the model, or the model and the
            arguments of its forward.
        inputs: arguments of its forward; None: those of the function, or it is a model of
            transformers.
    """

    delays = True

    def __init__(self, function: Callable[[], Any], inputs: Any) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function, self._inputs = function, inputs

    def check(self) -> None:
        try:
            self.traced()
        except BadUse as error:
            raise ValueError(str(error)) from error

    def traced(self) -> LoadedModel:
        return made_by(self._function, self.name, self._inputs)

    def make(self, dtype: torch.dtype) -> nn.Module:
        with model_creation(dtype=dtype):
            made = self._function()
        return split_made(made, self.name)[0].train()

    def load(self, model: DistributedModel) -> None:
        """Leaves the model as it is: parameters without a source draw their values."""


@dataclass
class Given(Source):
    """A module that the script has made, with its values or on the meta device.

    Attributes:
        module: the module.
        inputs: arguments of its forward; None: it is a model of transformers.
    """

    module: nn.Module
    inputs: Any = None

    def __post_init__(self) -> None:
        self.name = type(self.module).__name__
        self.delays = any(parameter.is_meta for parameter in self.module.parameters())

    def check(self) -> None:
        if self.inputs is None and getattr(self.module, "config", None) is None:
            raise ValueError(
                f"nothing is known of the arguments of {self.name}; give inputs=, the arguments of "
                "its forward for one batch (a dictionary, a tuple or a tensor)"
            )

    def traced(self) -> LoadedModel:
        tensors = (*self.module.parameters(), *self.module.buffers())
        # Tensors are found in the memo, so nothing is copied.
        memo: dict[int, Any] = {id(tensor): _without_memory(tensor) for tensor in tensors}
        return with_call(self.name, copy.deepcopy(self.module, memo), self.inputs, self.name)

    def make(self, dtype: torch.dtype) -> nn.Module:
        return self.module

    def load(self, model: DistributedModel) -> None:
        """Leaves the module as it is: it has its values, or draws them."""


def source_of(model: Any, inputs: Any) -> Source:
    """Returns the source of the first argument of `smp.auto`.

    Raises:
        ValueError: it is neither a module, nor a function, nor a name.
    """
    if isinstance(model, nn.Module):
        return Given(model, inputs)
    if isinstance(model, str | Path):
        return Pretrained(str(model))
    if callable(model):
        return Made(model, inputs)
    raise ValueError(
        "expected a folder or name of Hugging Face, a module, or a function that makes one, got "
        + type(model).__name__
    )


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if packed.is_packed(tensor):
        empty: torch.Tensor = packed.mapped(tensor, lambda _, part: part.to("meta"))
        return empty
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
    return tensor.to("meta")


def _renaming(name: str, model: nn.Module, stored: Iterable[str]) -> Renaming:
    """Returns the names in a model of what its files hold, as transformers reads them.

    Raises:
        ValueError: tensors are missing, or transformers makes tensors of the model from several.
    """
    names = _names_in(name, model, stored)
    values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found = {id(values[own]) for own in names.values() if own in values}
    missing = [own for own in model.state_dict() if id(values.get(own)) not in found]
    if missing:
        raise ValueError(
            f"the weights of {name!r} do not fit {type(model).__name__}: {len(missing)} tensors "
            f"are missing, the first is {missing[0]!r}; give a folder with all of them"
        )
    if unknown := [key for key, own in names.items() if own not in values]:
        first_rank_log.warning(
            "smp.auto: %d tensors in %s are not in %s and are not read, the first is %s",
            len(unknown), name, type(model).__name__, unknown[0],
        )  # fmt: skip
    return Renaming({key: own for key, own in names.items() if own in values})


def _names_in(name: str, model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Returns names of a model by names in its files."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        conversions = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return {key: key for key in stored}  # older releases store the names of the model
    rules = conversions.get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    found, state = {}, model.state_dict()
    for key in stored:
        own, converter = loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if converter is not None and key not in state:
            raise ValueError(
                f"the files of {name!r} hold {key!r}, and transformers makes {own!r} from several "
                "such tensors when it loads them; load the model by from_pretrained, save it by "
                "torch.save as pytorch_model.bin, and give that folder"
            )
        found[key] = key if key in state else own
    return found


def _fetched(name: str) -> Path:
    """Returns the folder with the files of a model of the hub, which are fetched if needed.

    Raises:
        ValueError: there is no such model, or it cannot be fetched.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ValueError(
            f"no folder {name!r}, and names need the package huggingface_hub"
        ) from None
    try:
        load_huggingface(name)  # asks for the configuration first, and does not wait for a network
        found = hub.snapshot_download(name, allow_patterns=list(_PATTERNS))
    except BadUse as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # clients of the hub raise errors of many libraries
        raise ValueError(f"the files of {name!r} cannot be fetched: {error}") from None
    return Path(found)
