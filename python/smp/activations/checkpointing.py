"""Checkpoints activations of modules: `checkpoint`, `checkpoint_sequential`, and marks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp import activations
from smp.activations.placement import is_together
from smp.activations.strategies import parse_strategy
from smp.modules.compiled import plain
from smp.modules.tracing import is_tracing
from smp.world import runtime

__all__ = ["checkpoint", "checkpoint_sequential", "set_activation_checkpointing"]


def checkpoint(
    module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Calls a module and keeps its arguments only; its backward computes it again.

    Used inside of a ``forward`` in the place of ``module(*args, **kwargs)``, for this one call. The
    module may live on any rank; that rank computes it again.

    Args:
        module: module that lies on one partition.
        args, kwargs: arguments of the module, nested in any way.
        preserve_rng_state: whether the second run draws the random numbers of the first.

    Returns:
        what the module returns.

    Raises:
        TypeError: ``module`` is a plain function.
        ValueError: the user placed the module on several partitions. If the library did, the call
            runs without checkpointing, and rank 0 warns.
    """
    _check_module(module)
    if not torch.is_grad_enabled() or is_tracing() or not is_together(module):
        return module(*args, **kwargs)
    return activations.checkpoint_call(module, module, args, kwargs, preserve_rng_state)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls a sequence whose layers, or groups of layers, are one checkpoint each.

    Args:
        sequential_module: the sequence; its layers may live on different ranks.
        input: input of the first layer; a tuple is passed as one argument.
        strategy: "each", "contiguous" (neighbours on one partition together) or "group_<N>" (at
            most N of them). A budget needs `set_activation_checkpointing`.
        preserve_rng_state: whether second runs draw the random numbers of the first.
        pack_args_as_tuple: accepted; all sequences behave so.

    Returns:
        what the last layer returns.

    Raises:
        TypeError: ``sequential_module`` is no ``nn.Sequential``.
        ValueError: the strategy is another one; the user placed one layer on several partitions.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise TypeError(
            f"{_C.rank_prefix()}checkpoint_sequential takes an nn.Sequential, not a "
            f"{type(sequential_module).__name__}; use smp.patches.checkpoint.checkpoint"
        )
    parsed = parse_strategy(strategy)
    if parsed.kind == "budget":
        raise ValueError(
            f"{_C.rank_prefix()}checkpoint_sequential: strategy {strategy!r} measures layers over "
            "several steps; use smp.set_activation_checkpointing"
        )
    return activations.checkpoint_sequence(sequential_module, input, parsed, preserve_rng_state)


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Checkpoints all calls of a module from now on: only its arguments are kept, and its backward
    computes it again. All ranks make this call alike, after ``DistributedModel(...)``.

    Losses and gradients do not change. An evaluation keeps nothing and is not affected.

    Args:
        module: module that lies on one partition; in an ``nn.Sequential``, each layer does. An
            ``nn.ModuleList`` or ``nn.ModuleDict`` is never called itself; each of its members is
            one checkpoint wherever it is called.
        preserve_rng_state: whether second runs draw the random numbers of the first.
        pack_args_as_tuple: accepted for sequences, whose layers may take and return a tuple as one
            argument in any case, and for lists and dicts.
        strategy: choice of checkpoints. For sequences: "each" layer alone; "contiguous":
            neighbours on one partition together; "group_<N>": at most N of them; "budget:<GiB>":
            as few layers as it takes to keep the activations of this sequence within so much
            memory on each rank. For a budget
            the first step checkpoints each layer and measures the bytes that autograd would keep,
            the operations done twice, and how many microbatches are under way at once. For lists
            and dicts: "each" or a budget; a caller may call their members in any order.

    Raises:
        TypeError: ``module`` is no module, or has no usable ``forward``.
        ValueError: the strategy is unknown; it asks for groups in a list or dict, or in a sequence
            with a forward of its own; arguments of sequences come with another module; the user
            placed the module on several partitions (checked here, or in the first step, when
            partitions are known). The library cuts a module only where the load of a rank would
            otherwise grow by more than a quarter; then its parts are checkpointed one by one, and
            rank 0 warns.
    """
    module = plain(module)
    _check_type(module)
    parsed = parse_strategy(strategy)
    is_container = activations.is_container(module)
    is_sequence = is_container or isinstance(module, nn.Sequential)
    if not is_sequence and (pack_args_as_tuple or strategy != "each"):
        raise ValueError(
            f"{_C.rank_prefix()}set_activation_checkpointing: pack_args_as_tuple and strategy are "
            f"for nn.Sequential, and the module is a {type(module).__name__}; leave them out"
        )
    if is_container and parsed.group_size != 1:
        raise ValueError(
            f"{_C.rank_prefix()}set_activation_checkpointing: the members of a "
            f"{type(module).__name__} are called one by one by the code around it, so no group of "
            f"them can be one checkpoint; use strategy='each' instead of {strategy!r}, or an "
            "nn.Sequential"
        )
    if is_sequence and type(module).forward is not nn.Sequential.forward and parsed.group_size != 1:
        raise ValueError(
            f"{_C.rank_prefix()}set_activation_checkpointing: {type(module).__name__} has a "
            f"forward of its own, which calls its layers one by one; use strategy='each' instead "
            f"of {strategy!r}"
        )
    activations.mark(module, preserve_rng_state, parsed if is_sequence else None)


def _check_module(module: object) -> None:
    """Refuses objects that are never called, and those `_check_type` refuses."""
    _check_type(module)
    if activations.is_container(module):
        raise TypeError(
            f"{_C.rank_prefix()}a {type(module).__name__} is never called, so there is no call of "
            "it to checkpoint; do that with each of its members, or mark all of them with "
            "smp.set_activation_checkpointing"
        )


def _check_type(module: object) -> None:
    if runtime.is_initialized() and any(
        module is model for model in runtime.current().wrapped.models
    ):
        raise TypeError(
            f"{_C.rank_prefix()}a DistributedModel cannot be checkpointed as a whole; do that with "
            "modules inside of it"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{_C.rank_prefix()}a {type(module).__name__} cannot be checkpointed, only an "
            "nn.Module: put the code into one (torch.utils.checkpoint takes functions, with "
            "use_reentrant=False)"
        )
