"""Checks of modules that are passed to `DistributedModel`."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn

import smp._C as _C
from smp.modules.foreign_wrappers import reason_to_refuse
from smp.modules.materialize import memory_span
from smp.world import runtime

# Most frames between code of a wrapper and the model that it calls.
_CALLS_INSIDE = 6


def check_module(module: nn.Module, current: runtime.Runtime, wrapper: type[nn.Module]) -> None:
    """Raises a ValueError, with the reason, for a module that cannot be wrapped.

    Args:
        module: the user's module.
        current: the runtime, whose other models count.
        wrapper: class `DistributedModel`, of which no instance is wrapped.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"DistributedModel wraps an nn.Module, not a {type(module).__name__}")
    for name, child in module.named_modules():
        where = f"'{name}'" if name else "the model itself"
        if isinstance(child, wrapper):
            raise ValueError(f"{where} is a DistributedModel already")
        if (reason := reason_to_refuse(child)) is not None:
            raise ValueError(f"{where} {reason}")
    _check_scaled_rows(module, current)
    _check_shared(module, current)
    _check_memory(module, current)


def refuse_around(model: nn.Module) -> None:
    """Raises if an unsupported wrapper has been put around a model.

    Wrappers ask for parameters when they are made, or call the model later.

    Raises:
        ValueError: names the wrapper.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_CALLS_INSIDE):
        if frame is None:
            return
        # A frame keeps the dictionary of its locals once it is read, so frames of scripts are not
        # read.
        is_torch = str(frame.f_globals.get("__name__", "")).startswith("torch.")
        around = frame.f_locals.get("self") if is_torch else None
        if isinstance(around, nn.Module) and (reason := reason_to_refuse(around)) is not None:
            raise ValueError(
                f"{_C.rank_prefix()}the module around this {type(model).__name__} {reason}"
            )
        frame = frame.f_back


def _check_scaled_rows(module: nn.Module, current: runtime.Runtime) -> None:
    """Refuses ``max_norm`` with replicas: each would scale only the rows that it reads."""
    tables, replicas = (nn.Embedding, nn.EmbeddingBag), current.rank.sizes["dp_cp"]
    for name, table in module.named_modules():
        if isinstance(table, tables) and table.max_norm is not None and replicas > 1:
            raise ValueError(
                f"{_C.rank_prefix()}'{name}' ({type(table).__name__}) has "
                f"max_norm={table.max_norm}: its forward scales the rows that it reads, and each "
                f"of {replicas} replicas reads other rows, so their weights would differ. Use "
                "max_norm=None and scale all rows after optimizer.step(), or one replica"
            )


def _check_shared(module: nn.Module, current: runtime.Runtime) -> None:
    """Refuses parameters that another wrapped model has: each has one owner and one reduction."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    models: list[Any] = list(current.wrapped.models)
    for other in models:
        wrapped: nn.Module = other.get_module()
        for name, parameter in wrapped.named_parameters():
            if id(parameter) in names:
                raise ValueError(
                    f"{_C.rank_prefix()}parameter '{names[id(parameter)]}' is '{name}' of a model "
                    f"that is wrapped already ({other._label}); put both into one module and wrap "
                    "that, or delete the other one first"
                )


def _check_memory(module: nn.Module, current: runtime.Runtime) -> None:
    """Refuses a parameter that moves but shares its memory with another tensor.

    Tied parameters are one tensor. Two tensors with one memory are updated twice in one process,
    and would become different after a move.
    """
    rank = current.rank
    moves_all = (
        rank.sizes["pp"] > 1 or rank.sizes["shard"] > 1 or rank.config.half_dtype is not None
    )
    named = dict(module.named_buffers()) | dict(module.named_parameters())
    spans = sorted(
        (span, name)
        for name, tensor in named.items()
        if type(tensor) in (Tensor, nn.Parameter) and (span := memory_span(tensor)) is not None
    )
    end, last = 0, ""
    for (begin, stop), name in spans:
        if begin < end:
            pair = named[last], named[name]
            moves = moves_all or any(t.device != rank.device or not t.is_contiguous() for t in pair)
            if moves and any(isinstance(tensor, nn.Parameter) for tensor in pair):
                raise ValueError(
                    f"{_C.rank_prefix()}'{last}' and '{name}' are two tensors with memory in "
                    "common, which would be two different ones after wrapping: make them one "
                    "parameter (other.weight = self.weight), or compute one from the other in "
                    "forward"
                )
        if stop > end:
            end, last = stop, name
