"""Decides which dtype each tensor of a model has in 16-bit training.

Parameters become 16 bits wide. Buffers keep their dtype, because they hold frequencies, statistics
and counters, which are not multiplied by activations. A model of transformers gets the dtypes that
its own ``from_pretrained(dtype=...)`` gives: its code is written for these, and casts the inputs of
modules that stay in float32.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smp.modules.materialize import cast

_TRAINED_IN = "_smp_trained_in"
# Names of modules that a model of transformers keeps in float32: in float16, and in both.
_KEPT_IN_FP16, _KEPT = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"


@dataclass(frozen=True)
class TrainingDtypes:
    """The dtypes of a model's floating tensors in 16-bit training.

    Attributes:
        half: dtype of 16 bits.
        parameters: dtypes of parameters that differ from ``half``.
        buffers: dtypes of buffers, by module and name; a buffer that is missing keeps its own.
        mixes: whether activations of 16 bits meet wider parameters, or meet wider buffers outside
            transformers, whose code is written for the buffers that it gets.
    """

    half: torch.dtype
    parameters: dict[nn.Parameter, torch.dtype]
    buffers: dict[tuple[nn.Module, str], torch.dtype]
    mixes: bool = False

    def of(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype of a floating parameter in training."""
        return self.parameters.get(parameter, self.half)

    def cast(self, root: nn.Module) -> None:
        """Casts all floating tensors of a model that have another dtype."""
        for parameter in root.parameters():
            if parameter.is_floating_point():
                cast(parameter, self.of(parameter))
        for (module, name), dtype in self.buffers.items():
            module._buffers[name] = module._buffers[name].to(dtype)  # type: ignore[union-attr]


def plan_dtypes(root: nn.Module, half: torch.dtype) -> TrainingDtypes:
    """Decides the dtypes of a model, and notes them at its parameters for `training_dtype`.

    Args:
        root: the model, which is not cast here.
        half: torch.float16 or torch.bfloat16.
    """
    parameters: dict[nn.Parameter, torch.dtype] = {}
    buffers: dict[tuple[nn.Module, str], torch.dtype] = {}
    asked: dict[tuple[nn.Module, str], torch.dtype] = {}
    kept: set[tuple[nn.Module, str]] = set()  # tensors that code of transformers casts itself
    _ask(root, half, asked, kept)
    mixes = False
    for module in root.modules():
        for name, parameter in module._parameters.items():
            dtype = asked.get((module, name), half)
            if parameter is not None and parameter.is_floating_point() and dtype != half:
                parameters[parameter] = dtype
                setattr(parameter, _TRAINED_IN, dtype)
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            wanted = asked.get((module, name), buffer.dtype)
            mixes = mixes or ((module, name) not in kept and wanted.itemsize > half.itemsize)
            if wanted != buffer.dtype:
                buffers[module, name] = wanted
    return TrainingDtypes(half, parameters, buffers, mixes or bool(parameters))


def training_dtype(parameter: Tensor, half: torch.dtype) -> torch.dtype:
    """Returns the dtype of a floating parameter in 16-bit training, planned by `plan_dtypes`."""
    dtype: torch.dtype = getattr(parameter, _TRAINED_IN, half)
    return dtype


def _ask(
    module: nn.Module,
    half: torch.dtype,
    asked: dict[tuple[nn.Module, str], torch.dtype],
    kept: set[tuple[nn.Module, str]],
) -> None:
    """Finds the outermost models of transformers, and adds the dtypes that they give."""
    is_theirs = hasattr(type(module), _KEPT) and hasattr(module, "config")
    own = _made_in(module, half) if is_theirs else None
    if own is None:
        for child in module.children():
            _ask(child, half, asked, kept)
    if not is_theirs:
        return
    names = set(getattr(module, _KEPT) or ())
    if half == torch.float16:
        names.update(getattr(module, _KEPT_IN_FP16, None) or ())
    pattern = re.compile("|".join(name.replace("*", ".*") for name in sorted(names)) or r"(?!)")
    for name, place in _places(module):
        kept.add(place)
        if _is_stored(*place) and pattern.search(name):
            asked[place] = torch.float32
        elif own is not None and name in own:
            asked[place] = own[name]


def _places(root: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            yield f"{prefix}.{name}" if prefix else name, (module, name)


def _is_stored(module: nn.Module, name: str) -> bool:
    """Returns whether state dicts contain a tensor; only these are kept in float32."""
    return name not in module._non_persistent_buffers_set


def _made_in(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype] | None:
    """Returns the dtypes of a new model of this class, made in a dtype as ``from_pretrained`` does.

    The new model has no memory. Returns None if its class needs more than a configuration.
    """
    try:
        with _made_without_memory(dtype):
            made = type(model)(copy.deepcopy(model.config))
    except Exception:  # constructors may raise any exception
        return None
    tensors = (
        *made.named_parameters(remove_duplicate=False),
        *made.named_buffers(remove_duplicate=False),
    )
    return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}


@contextlib.contextmanager
def _made_without_memory(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
