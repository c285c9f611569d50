"""The smallest module around columns and the rows that they feed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp.dropout import blocks, places
from smp.modules.tracing import is_tracing
from smp.nn.draws import any_drops, draws_from, rates_in
from smp.nn.layout import Layout
from smp.nn.module import DistributedModule
from smp.nn.planned import borders
from smp.nn.planned.calls import Call, call_of_block
from smp.nn.planned.linear import has_hooks
from smp.nn.planned.trial import Trial, can_be_tried
from smp.nn.planned.whole_gradients import WholeGradients
from smp.tensor_parallel import regions


class PlannedBlock(DistributedModule):
    """The base of the classes that blocks get; the forward of the former class runs inside.

    Activations are common inside. With own batches the samples of all ranks are gathered at the
    block's start, and each rank gets its own samples at its end.

    Attributes:
        _smp_layout: layout of the model.
        _smp_name: name of the block in the model.
        _smp_heads: numbers of query heads of this rank and of all ranks, for attention.
        _smp_has_bias: a table inside has a bias for each of these heads, which is a result.
        _smp_rates: places of dropout rates inside, or None before the first search.
        _smp_sums_late: whether rows inside may leave their sums to code that reads them, because
            ranks have own batches and none has hooks there; None before ranks agreed on it.
        _smp_whole_gradients: check of its whole parameters, or None after their check.
        _smp_trial: trial of its code, or None if it was made or is not wanted.
    """

    is_indivisible = True  # activations between its parts are split

    _smp_layout: Layout
    _smp_name: str
    _smp_heads: tuple[int, int] | None = None
    _smp_has_bias: bool = False
    _smp_rates: list[tuple[nn.Module, str]] | None = None
    _smp_sums_late: bool | None = None
    _smp_whole_gradients: WholeGradients | None = None
    _smp_trial: Trial | None = None


def block_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that blocks of this class get."""
    if issubclass(cls, PlannedBlock):
        return cls
    if cls not in _classes:
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(self, functools.partial(inner, self), args, kwargs)

        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _classes[cls] = type(
            cls.__name__,
            (PlannedBlock, cls),
            {**members, "__doc__": cls.__doc__, "forward": forward},
        )
    return _classes[cls]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _run(
    block: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    layout: Layout = block._smp_layout
    num_samples = 0
    check: WholeGradients | None = block._smp_whole_gradients
    # A run outside of the step may fail without ending it.
    if check is not None and check.is_due() and not (regions.is_alone() or is_tracing()):
        block.__dict__["_smp_whole_gradients"] = None
        check.run()
    call = Call(sums_late=_sums_late(block))
    if layout.has_own_batches:
        args, kwargs, num_samples = regions.in_layer(
            block._smp_name, borders.enter, layout, block._smp_name, args, kwargs, call
        )
    trial: Trial | None = block._smp_trial
    if trial is not None and can_be_tried(args, kwargs):
        block.__dict__["_smp_trial"] = None
        trial.run(block, block._smp_name, inner, args, kwargs)
    drawing = _drawing(block, (*args, *kwargs.values()))
    masks = blocks.entered(layout.has_own_batches)
    with call_of_block(call), drawing, masks:
        output = inner(*args, **kwargs)
    if block._smp_heads is not None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        num_own, num_all = block._smp_heads
        output = _without_weights(output, num_own, num_all, given, block._smp_has_bias)
    if layout.has_own_batches:
        output = regions.in_layer(
            block._smp_name, borders.leave, layout, block._smp_name, output, num_samples
        )
    return output


def _sums_late(block: Any) -> bool:
    if not block._smp_layout.has_own_batches or regions.is_alone():
        return False
    if block._smp_sums_late is None:
        is_free = not any(has_hooks(x) for x in block.modules() if x is not block)
        block.__dict__["_smp_sums_late"] = regions.all_say(is_free, "hooks in a block of a plan")
    return bool(block._smp_sums_late)


def _without_weights(
    output: Any, num_own: int, num_all: int, given: Sequence[Tensor], has_bias: bool
) -> Any:
    """Returns attention's output without weights if this rank's heads are not all heads.

    A bias for own heads stays, which later blocks read: an argument that is handed on, or the
    first such tensor of a block that makes one.
    """
    if type(output) is not tuple or num_own == num_all:
        return output
    kept = list(output[:1])
    for x in output[1:]:
        is_of_heads = isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == num_own
        if is_of_heads and not any(x is one for one in given):
            x, has_bias = (x, False) if has_bias else (None, False)
        kept.append(x)
    return tuple(kept)


def _drawing(block: Any, given: tuple[Any, ...]) -> Any:
    """Returns a context for dropout in a block: ranks drop the same, as activations are common.

    The number of draws differs where heads are split unevenly, so generators are restored.
    """
    if not block.training or places.current() is not None:
        return contextlib.nullcontext()
    rates = block._smp_rates
    if rates is None:
        rates = block.__dict__["_smp_rates"] = rates_in(block)
    if not any_drops(rates):
        return contextlib.nullcontext()
    tensor = next((x for x in given if isinstance(x, Tensor)), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    return draws_from(regions.common_seed(), device)
