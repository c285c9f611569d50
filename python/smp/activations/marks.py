"""Checkpoints modules and sequences, wherever their parts live.

A mark wraps the forward of a module, inside of the wrapper that sends its calls to another rank, so
it takes effect where the module lives. All ranks mark the same modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from smp.activations.budget import Budget
from smp.activations.placement import is_together, place_of, whole_or_parts
from smp.activations.recompute import recompute
from smp.activations.requests import Request, asking, fulfil
from smp.activations.strategies import Strategy, plan_groups
from smp.dropout import frames
from smp.modules.forwards import Forward, WrapperKind, is_wrapped, wrap_forward
from smp.modules.tracing import is_tracing


@dataclass
class _Mark:
    preserve_rng_state: bool
    strategy: Strategy | None  # of sequences and containers
    undo: list[Callable[[], None]] = field(default_factory=list)


_marks: WeakKeyDictionary[nn.Module, _Mark] = WeakKeyDictionary()


def mark(module: nn.Module, preserve_rng_state: bool, strategy: Strategy | None) -> None:
    """Checkpoints all calls of a module from now on; replaces an earlier mark.

    Args:
        module: module to checkpoint; a strategy applies to the layers of a sequence, alone or in
            groups, or to the members of a container.
        preserve_rng_state: see `smp.activations.recompute`.
        strategy: strategy of a sequence or a container; None for other modules.

    Raises:
        ValueError: the user placed the module on several partitions.
    """
    earlier = _marks.get(module)
    made = _Mark(preserve_rng_state, strategy)
    if earlier is not None:
        made.undo = earlier.undo
    _marks[module] = made
    _settle(module, made)


def is_marked(module: nn.Module) -> bool:
    """Returns whether a module is marked."""
    return module in _marks


def units(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns the modules that are one checkpoint each, from marked modules and sequences."""
    found: set[nn.Module] = set()
    for module in modules:
        made = _marks.get(module)
        if made is not None:
            found.update([module] if made.strategy is None else _called(module))
    return found


def is_container(module: object) -> bool:
    """Returns whether an object is a list or dict of modules that is never called as a whole."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return type(module).forward is nn.Module.forward


def settle_marks(modules: Iterable[nn.Module]) -> None:
    """Adapts marks that were made before the partition was known.

    Raises:
        ValueError: the user placed a marked module on several partitions.
    """
    for module in modules:
        made = _marks.get(module)
        if made is not None:
            _settle(module, made)


def _settle(module: nn.Module, made: _Mark) -> None:
    for undo in made.undo:
        undo()
    made.undo.clear()
    if made.strategy is None:
        for part in whole_or_parts([module]):
            around = functools.partial(_around, part, made.preserve_rng_state)
            made.undo.append(wrap_forward(part, WrapperKind.CHECKPOINT, around))
        return
    layers = list(_called(module))
    if made.strategy.kind == "budget":
        budget = Budget(made.strategy.budget_bytes, made.preserve_rng_state)
        for layer in whole_or_parts(layers):
            around = functools.partial(budget.around, layer)
            made.undo.append(wrap_forward(layer, WrapperKind.CHECKPOINT, around))
    elif made.strategy.group_size == 1:
        for layer in whole_or_parts(layers):
            around = functools.partial(_around, layer, made.preserve_rng_state)
            made.undo.append(wrap_forward(layer, WrapperKind.CHECKPOINT, around))
    if is_container(module):
        return
    groups = functools.partial(_around_sequence, module, made)
    made.undo.append(wrap_forward(module, WrapperKind.CHECKPOINT, groups))


def wrap_call(module: nn.Module) -> Callable[[], None]:
    """Checkpoints all calls of a module until the returned function is called."""
    return wrap_forward(module, WrapperKind.CHECKPOINT, functools.partial(_around, module, True))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers of a sequence, or members of a container and of containers in it."""
    for child in module.children():
        if is_container(child):
            yield from _called(child)
        else:
            yield child


def _around(module: nn.Module, preserve_rng_state: bool, inner: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return recompute(
            inner, args, kwargs, preserve_rng_state=preserve_rng_state, modules=(module,)
        )

    return forward


def _around_sequence(module: nn.Module, made: _Mark, inner: Forward) -> Forward:
    strategy = made.strategy
    assert strategy is not None
    if strategy.kind == "budget" or strategy.group_size == 1:
        return inner  # each layer has a wrapper, whatever the sequence's forward is

    def forward(input: Any) -> Any:
        return checkpoint_sequence(module, input, strategy, made.preserve_rng_state)

    return forward


def checkpoint_sequence(
    module: nn.Module, input: Any, strategy: Strategy, preserve_rng_state: bool
) -> Any:
    """Runs the layers of a sequence; groups of them are one checkpoint each.

    Args:
        module: sequence whose children take the result of the one before.
        input: input of the first layer.
        strategy: strategy of kind "groups".
        preserve_rng_state: see `smp.activations.recompute`.

    Raises:
        ValueError: the user placed a layer on several partitions.
    """
    layers = list(module.children())
    with frames.inside(module):
        return _run_layers(layers, input, strategy, preserve_rng_state)


def _run_layers(
    layers: Sequence[nn.Module], input: Any, strategy: Strategy, preserve_rng_state: bool
) -> Any:
    if not torch.is_grad_enabled():
        return _run_plainly(layers, input)
    if is_tracing():  # partitions are not known yet
        for layer in layers:
            input = recompute(layer, (input,), modules=(layer,))
        return input
    places = [place_of(layer) if is_together(layer) else None for layer in layers]
    for group, is_checkpoint in plan_groups(places, strategy.group_size):
        members = [layers[idx] for idx in group]
        if is_checkpoint:
            input = _run_group(members, input, preserve_rng_state)
        else:
            input = _run_plainly(members, input)
    return input


def _run_plainly(layers: Sequence[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


def _run_group(layers: Sequence[nn.Module], input: Any, preserve_rng_state: bool) -> Any:
    if len(layers) == 1:
        return checkpoint_call(layers[0], layers[0], (input,), {}, preserve_rng_state)
    request = Request(tuple(layers), preserve_rng_state)
    if not is_wrapped(layers[0], WrapperKind.REMOTE):
        return fulfil(request, layers[0], (input,), {})
    with asking(request):
        # Hooks of the layers run where the layers run.
        return layers[0].forward(input)


def checkpoint_call(
    module: nn.Module,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    preserve_rng_state: bool,
) -> Any:
    """Runs one call of a module as a checkpoint, on the rank where the module lives.

    Args:
        module: module that lies on one partition.
        function: function that calls the module, or its forward.
        args, kwargs: arguments of ``function``.
        preserve_rng_state: see `smp.activations.recompute`.
    """
    if is_wrapped(module, WrapperKind.CHECKPOINT):  # marked as well
        return function(*args, **kwargs)
    if is_wrapped(module, WrapperKind.REMOTE):
        with asking(Request((module,), preserve_rng_state)):
            return function(*args, **kwargs)
    return recompute(
        function, args, kwargs, preserve_rng_state=preserve_rng_state, modules=(module,)
    )
