"""Builds the model of a command without memory for its weights."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp.commands.ending import BadUse

_MOST_TOKENS = 2048  # of a sample, if no length is given
_PATIENCE_S = 1.5  # until the server of models has to answer

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LoadedModel:
    """A model on the meta device, with arguments for it.

    Attributes:
        name: name that was given.
        module: the model, in training mode.
        call: function of (batch, seq) that returns positional and keyword arguments of a forward:
            small real tensors on the CPU, with labels if the model computes the loss. If ``seq`` is
            None the model's own length is used.
        trained: class and configuration, for messages.
    """

    name: str
    module: nn.Module
    call: Callable[[int, int | None], Call]
    trained: str


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences advice of transformers about a configuration, which does not help before a run."""
    try:
        logging = importlib.import_module("transformers.utils.logging")
    except ImportError:
        yield
        return
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_model(name: str) -> LoadedModel:
    """Builds a model by its name, without reading or allocating weights.

    Args:
        name: a name or folder of Hugging Face with a configuration, or ``module:function``. The
            function takes no arguments, runs on the meta device and returns a model, or a model and
            the arguments of its forward (a dictionary, a tuple or a tensor; the first dimension of
            tensors is the batch). Modules are also looked for in the current folder.

    Raises:
        BadUse: there is no such model, it cannot be built, or its arguments are not known.
    """
    if ":" in name and not Path(name).exists():
        return _of_function(name)
    return load_huggingface(name, ", or module:function")


def _of_function(name: str) -> LoadedModel:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise BadUse(
            f"model {name!r} cannot be imported: {_first_line(error)}; expected module:function, "
            "with the module in the current folder or on PYTHONPATH"
        ) from None
    if not callable(function):
        raise BadUse(f"model {name!r}: {function_name} is no function")
    return made_by(function, name)


def made_by(function: Callable[[], Any], name: str, inputs: Any = None) -> LoadedModel:
    """Builds a model by a function, on the meta device.

    Args:
        function: function that returns a model, or a model and the arguments of its forward.
        name: name of the function for messages.
        inputs: arguments of the forward, if the function returns the model alone.

    Raises:
        BadUse: the function fails or returns something else, or the arguments are not known.
    """
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:
        raise BadUse(f"model {name!r}: its function raised {_first_line(error)}") from error
    module, own = split_made(made, name)
    module.train()
    inputs = own if inputs is None else inputs
    if inputs is None and getattr(module, "config", None) is None:
        raise BadUse(
            f"model {name!r}: nothing is known of the arguments of {type(module).__name__}; return "
            "the model and the arguments of its forward (a dictionary, tuple or tensor)"
        )
    return with_call(name, module, inputs, f"{type(module).__name__} of {name}")


def split_made(made: Any, name: str) -> tuple[nn.Module, Any]:
    """Returns the model and the arguments, or None, that a function has returned.

    Raises:
        BadUse: there is no model.
    """
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise BadUse(
            f"model {name!r}: its function returned {type(made).__name__}; expected a module, or a "
            "module and the arguments of its forward"
        )
    return module, inputs


def with_call(name: str, module: nn.Module, inputs: Any, trained: str) -> LoadedModel:
    """Returns a model on the meta device with arguments for it.

    Args:
        name: name of the model.
        module: the model.
        inputs: arguments of its forward (a dictionary, a tuple or a tensor); None: it is a model
            of transformers, and its configuration tells them.
        trained: class and configuration, for messages.

    Raises:
        BadUse: the arguments are not known.
    """
    if inputs is not None:
        return LoadedModel(name, module, _resized(inputs), trained)
    return LoadedModel(name, module, _call_of_huggingface(name, module), trained)


def load_huggingface(name: str, others: str = "") -> LoadedModel:
    """Builds a model of a folder or name of Hugging Face.

    Args:
        name: the folder or name.
        others: words for other forms of names that the caller takes.

    Raises:
        BadUse: there is no such model, it cannot be built, or its arguments are not known.
    """
    try:
        import transformers
    except ImportError:
        raise BadUse(
            f"model {name!r} needs transformers, which is not installed; install it"
            + (", or give module:function" if others else "")
        ) from None
    away = _why_unreachable() if _can_be_of_hub(name) else None
    try:
        # Files that were downloaded before are there without a connection, too.
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=away is not None)
    except Exception as error:
        reason = _first_line(error) if away is None else f"{away}; {_first_line(error)}"
        raise BadUse(
            f"no model {name!r}: {reason}; expected a folder with config.json or a name of Hugging "
            f"Face{others}"
        ) from None
    if getattr(config, "use_cache", False):
        config.use_cache = False  # training has no use for it
    names = getattr(config, "architectures", None) or ()
    cls = next((found for n in names if (found := getattr(transformers, n, None))), None)
    try:
        with torch.device("meta"):
            if cls is None:
                module = transformers.AutoModelForCausalLM.from_config(config)
            else:
                module = cls(config)
    except Exception as error:
        raise BadUse(f"model {name!r} cannot be built: {_first_line(error)}") from error
    module.train()
    return LoadedModel(name, module, _call_of_huggingface(name, module), type(module).__name__)


def _can_be_of_hub(name: str) -> bool:
    """Returns whether a name is no folder, and has the form NAME or OWNER/NAME of models there."""
    return not Path(name).exists() and name.count("/") <= 1 and name[:1] not in "./~"


def _why_unreachable() -> str | None:
    """Returns a reason in words if the server of models does not answer, or None.

    The client of `huggingface_hub` would retry for half a minute. The request uses its session, so
    its proxies and its offline switch count. It runs in a thread, because looking up a name obeys
    no timeout.
    """
    hub = importlib.import_module("huggingface_hub")
    endpoint: str = importlib.import_module("huggingface_hub.constants").ENDPOINT
    found: list[str | None] = []

    def ask() -> None:
        try:
            hub.utils.get_session().head(endpoint, timeout=_PATIENCE_S)
            found.append(None)
        except Exception as error:  # the session may raise any exception
            text = str(error).strip().splitlines()
            found.append(text[0] if text else type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    reason = found[0] if found else f"no answer within {_PATIENCE_S:g} s"
    return None if reason is None else f"{endpoint} cannot be reached ({reason})"


def _call_of_huggingface(name: str, module: nn.Module) -> Callable[[int, int | None], Call]:
    """Returns a function that makes arguments of the model, or of the one below its adapters."""
    config: Any = module.config
    own: Any = getattr(module, "get_base_model", lambda: module)()
    known = inspect.signature(own.forward).parameters
    longest = getattr(config, "max_position_embeddings", None)
    kind = type(own).__name__

    def tokens(batch: int, seq: int | None) -> Call:
        length = seq or min(longest or _MOST_TOKENS, _MOST_TOKENS)
        if longest is not None and length > longest:
            raise BadUse(f"model {name!r} takes {longest} tokens at most, got --seq {length}")
        ids = torch.zeros(batch, length, dtype=torch.long)
        whole = kind.endswith(("LM", "LMHeadModel", "ConditionalGeneration", "PreTraining"))
        return (), {"input_ids": ids, "labels": ids.clone() if whole else ids[:, 0].clone()}

    def pictures(batch: int, seq: int | None) -> Call:
        side = config.image_size
        size = (side, side) if isinstance(side, int) else tuple(side)
        pixels = torch.zeros(batch, config.num_channels, *size)
        return (), {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}

    if "input_ids" in known:
        make = tokens
    elif "pixel_values" in known and hasattr(config, "image_size"):
        make = pictures
    else:
        raise BadUse(
            f"model {name!r}: the arguments of {kind} are not known (neither input_ids nor "
            "pixel_values); give module:function, which returns the model and its arguments"
        )

    def call(batch: int, seq: int | None) -> Call:
        args, kwargs = make(batch, seq)
        return args, {key: value for key, value in kwargs.items() if key in known}

    return call


def _resized(inputs: Any) -> Callable[[int, int | None], Call]:
    """Returns a function that resizes arguments to a batch; without memory they become zeros."""

    def call(batch: int, seq: int | None) -> Call:
        if seq is not None:
            raise BadUse("--seq has no effect on a function's own arguments; leave it out")
        own = pytree.tree_map_only(Tensor, lambda t: _of_batch(t, batch), inputs)
        if isinstance(own, Mapping):
            return (), dict(own)
        return tuple(own) if isinstance(own, Sequence) else (own,), {}

    return call


def _of_batch(tensor: Tensor, batch: int) -> Tensor:
    if tensor.dim() == 0:
        return torch.zeros((), dtype=tensor.dtype) if tensor.is_meta else tensor
    return torch.zeros((batch, *tensor.shape[1:]), dtype=tensor.dtype)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
