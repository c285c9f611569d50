"""Calls functions and keeps only their arguments; backward computes the calls again.

The node of autograd is in C++ (`csrc/memory/recompute.h`). This file handles arguments and results
of any nesting, and the surroundings of a call that its second run needs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import smp._C as _C
from smp.dropout.places import RepeatedRun
from smp.modules import autocast, collected
from smp.modules.argument_containers import ArgumentContainers, copies
from smp.modules.flat import Flat, contents_of, is_cache, is_changed, tensors_in
from smp.modules.state_changes import EarlierState, Flags, StateComparison, flags_of
from smp.modules.tracing import is_tracing
from smp.modules.watching import unwatched
from smp.world import runtime


def is_recomputing() -> bool:
    """Returns whether this thread runs the second forward of a checkpointed module, in backward.

    The answer holds for the current microbatch and context; other contexts of this rank do not
    count.
    """
    return _C.is_recomputing()


def recompute(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    preserve_rng_state: bool = True,
    modules: Sequence[nn.Module] = (),
) -> Any:
    """Calls a function and keeps its arguments only; backward computes it again.

    Without gradients it is a plain call. In the tracing pass it is PyTorch's own checkpoint, whose
    kept tensors the trace can count. The second run has the grad mode, autocast, context variables
    and (``preserve_rng_state``) random numbers of the first. Results are equal bit by bit to those
    without checkpointing. So are gradients, except that those of an argument which is also used
    elsewhere may be added up in another order.

    Args:
        function: takes ``args`` and ``kwargs``. Tensors that need gradients reach it as arguments,
            or are parameters of its modules.
        args, kwargs: any values; tensors may be in containers, registered classes, dataclasses and
            attributes of other objects, not in closures. An object with a tensor that needs a
            gradient reaches the function as another object of its class; lists, dictionaries and
            sets always do, and items that the first run adds are added to those of the caller.
            Attention caches of transformers are left out, since the second run would fill them
            once more.
        preserve_rng_state: whether to repeat the random numbers of the CPU and of the device.
        modules: modules that the function runs, to find parameters that need gradients.

    Returns:
        the result of ``function``; its tensors hang on one node of autograd. Objects with
        floating-point tensors are new objects of their class.

    Raises:
        ValueError: the function puts tensors into an object among its arguments, or takes or
            returns tensors in an object that cannot be rebuilt; in backward: it returned other
            tensors than before, or gradients are wanted for some tensors only.

    Source: arXiv:1604.06174.
    """
    kwargs = kwargs or {}
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if is_tracing():
        traced = functools.partial(function, **kwargs)
        return torch.utils.checkpoint.checkpoint(traced, *args, use_reentrant=False)
    current = runtime.current() if runtime.is_initialized() else None
    return _Call(function, args, kwargs, modules, current).run(preserve_rng_state)


class _Call:
    """A checkpointed call; lives as long as its node."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modules: Sequence[nn.Module],
        current: runtime.Runtime | None,
    ) -> None:
        self._function = function
        self._modules = modules
        arguments = _without_caches(tuple(args), dict(kwargs))
        # The caller's objects, until the first run is over. Each run has lists, dictionaries and
        # sets of its own; changes by the first run are applied to the caller's.
        self._given: ArgumentContainers | None = ArgumentContainers.of_call(
            *arguments, objects=False
        )
        self._objects: ArgumentContainers | None = ArgumentContainers.of_call(*arguments)
        self._templates = self._given.templates()
        self._arguments = Flat(self._given.apart(arguments), counts=_needs_grad)
        self._result: Flat | None = None  # of the first run, its tensors taken out
        # Containers of context variables, to which a run adds, are not kept: both runs get their
        # outlines.
        self._collectors: list[Any] | None = []
        self._outlines: list[tuple[contextvars.ContextVar[Any], Any]] = []
        self._context = contextvars.copy_context()
        for var, container in collected.in_context():
            self._collectors.append(container)
            self._outlines.append((var, collected.outline(container)))
            self._context.run(var.set, None)
        self._masks = RepeatedRun()
        self._left: tuple[StateComparison, list[int]] | None = None
        self._modes = Flags(modules)
        self._earlier: EarlierState | None = None  # the state before the first run
        self._flags: tuple[bool, ...] = ()  # which of the tensors left behind are results
        self._own_device = None if current is None else current.rank.device
        self._store = None if current is None else current.activation_store

    def run(self, preserve_rng_state: bool) -> Any:
        given = self._arguments.take()
        tensors = [_local(tensor) for tensor in given]
        self._needing = [_needs_grad(tensor) for tensor in tensors]
        device = self._own_device or _device_of(tensors)
        self._device = device
        self._autocast = autocast.capture(device)
        results = _C.recompute(
            self._compute,
            tensors,
            needs_grad=self._needs_grad(tensors),
            preserve_random_state=preserve_rng_state,
            device=str(device),
            store=self._store,
        )
        assert self._result is not None
        # Tensors that passed through unchanged are returned as the caller's.
        same = {id(local): tensor for local, tensor in zip(tensors, given, strict=True)}
        filled = self._result.filled([same.get(id(t), t) for t in results])
        result, changes, found, left = filled
        assert self._given is not None and self._collectors is not None
        for idx, path, items in found:
            collected.add(self._collectors[idx], path, items)
        if self._left is not None:
            watch, ids = self._left
            watch.replace(dict(zip(ids, left, strict=True)))
            self._left = None
        settled = self._given.settle(changes, result)
        # Otherwise results would keep the graph alive, and the graph would keep them.
        self._given = self._objects = self._collectors = None
        return settled

    def _needs_grad(self, tensors: Sequence[Tensor]) -> bool:
        return any(tensor.requires_grad for tensor in tensors) or any(
            parameter.requires_grad for module in self._modules for parameter in module.parameters()
        )

    def _compute(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        if self._result is not None:
            return self._context.copy().run(self._again, tensors)
        made: dict[int, Any] = {}
        arguments = self._copies(tensors, made)
        before = [contents_of(value) for value in made.values()]
        watch = StateComparison(self._modules)
        with autocast.apply(self._autocast) if self._autocast else contextlib.nullcontext():
            told = self._call(arguments)
        _check_unchanged(made.values(), before)
        assert self._objects is not None
        _check_objects(self._objects)
        self._earlier = earlier = watch.compare().earlier()
        if watch.tensors:
            try_out = functools.partial(self._try_out, tensors, earlier)
            self._flags = flags_of(self._modules, watch, try_out)
        left = self._flagged(watch)
        self._left = (watch, list(map(id, left))) if left else None
        self._result = Flat((*told, left), counts=_may_have_grad)
        return self._result.take()

    def _flagged(self, watch: StateComparison) -> list[Tensor]:
        if not self._flags:
            return []
        return [t for t, flag in zip(watch.tensors, self._flags, strict=True) if flag]

    def _again(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        arguments = self._copies(tensors)
        assert self._earlier is not None
        casts = autocast.restore(self._autocast, self._device)
        modes = self._modes.again()
        with casts, modes, unwatched(), _statistics_kept(self._modules), self._earlier.again():
            watch = StateComparison(self._modules, copies=False) if self._flags else None
            told = self._call(arguments)
            left = [] if watch is None else self._flagged(watch.compare())
            return Flat((*told, left), counts=_may_have_grad).take()

    def _try_out(self, tensors: Sequence[Tensor], earlier: EarlierState) -> StateComparison:
        """Runs the function with a graph that is dropped afterwards."""
        random_state = _C.RandomState.capture(str(self._device))
        casts = autocast.apply(self._autocast) if self._autocast else contextlib.nullcontext()
        with torch.enable_grad(), casts, _statistics_kept(self._modules), earlier.again():
            own = [
                t.detach().requires_grad_().clone() if needs else t.detach().clone()
                for t, needs in zip(tensors, self._needing, strict=True)
            ]
            watch = StateComparison(self._modules, copies=False)
            self._context.copy().run(self._call, self._copies(own))
            watch.compare()
        random_state.restore()
        return watch

    def _copies(self, tensors: list[Tensor], made: dict[int, Any] | None = None) -> Any:
        return copies(self._templates, *self._arguments.filled(tensors, made))

    def _call(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, ...]:
        """Returns the result, and the changes to containers among the arguments."""
        args, kwargs = arguments
        given = ArgumentContainers.of_call(args, kwargs, objects=False)
        with self._masks.run(), self._collecting() as found:
            result = self._function(*args, **kwargs)
        return given.with_references(result), given.changes(), found

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[list[tuple[int, tuple[Any, ...], Any]]]:
        """Yields a list of later additions to context variables' containers: number, path, item."""
        found: list[tuple[int, tuple[Any, ...], Any]] = []
        tokens = [(var, var.set(collected.outline(before))) for var, before in self._outlines]
        try:
            yield found
            for idx, (var, before) in enumerate(self._outlines):
                found += [(idx, *one) for one in collected.added((), before, var.get())]
        except collected.Replaced:
            raise ValueError(
                f"{_C.rank_prefix()}a checkpointed module replaced or removed what is in the "
                f"context variable '{var.name}'; only additions can be followed"
            ) from None
        finally:
            for var, token in tokens:
                var.reset(token)


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad


def _may_have_grad(tensor: Tensor) -> bool:
    # The first run has no graph that shows it.
    return tensor.is_floating_point() or tensor.is_complex()


def _check_unchanged(objects: Iterable[Any], before: Sequence[tuple[Any, list[Any]]]) -> None:
    """Raises if an argument changed: it is a copy, so the caller's object would not change."""
    for value, was in zip(objects, before, strict=True):
        if is_changed(was, contents_of(value)):
            raise ValueError(
                f"{_C.rank_prefix()}a checkpointed module has changed an argument of class "
                f"{type(value).__name__}, in which there are tensors that need gradients; return "
                "what the module computes instead of storing it there"
            )


def _check_objects(objects: ArgumentContainers) -> None:
    """Raises if objects got tensors: those of the first run have no gradients."""
    for value, items in objects.new_items():
        if tensors_in(items):
            raise ValueError(
                f"{_C.rank_prefix()}a checkpointed module has put tensors into an argument of "
                f"class {type(value).__name__}; return what the module computes, or put it into a "
                "list or a dictionary"
            )


def _local(tensor: Tensor) -> Tensor:
    """Returns the tensor behind a handle for another rank's tensor."""
    while hasattr(tensor, "local"):
        tensor = tensor.local()
    return tensor


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def _without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not any(map(is_cache, args)) and not any(map(is_cache, kwargs.values())):
        return args, kwargs
    kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return tuple(None if is_cache(value) else value for value in args), kwargs


@contextlib.contextmanager
def _statistics_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keeps the statistics of batch norms from counting the second run as another batch."""
    # Writes go through `data`, so that autograd does not see saved tensors change.
    buffers = [
        buffer.data
        for module in modules
        if module.training
        for child in module.modules()
        if isinstance(child, _NormBase)
        for buffer in child.buffers(recurse=False)
    ]
    values = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
