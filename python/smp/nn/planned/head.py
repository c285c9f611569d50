"""The head of a language model whose code computes the loss, and the logits of its callers."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from smp.nn.huggingface.outputs import is_lazy, lazy_result
from smp.nn.planned.linear import PlannedGatheredColumn
from smp.nn.planned.logits import SplitLogits, Vocabulary
from smp.tensor_parallel import reading, regions
from smp.tensor_parallel.products import fp8_of


class PlannedHead(PlannedGatheredColumn):
    """A head whose logits are split: each rank has its part of the vocabulary."""

    @reading.own_code
    def forward(self, input: Tensor) -> Any:
        """Maps ``[*, in]`` to ``[*, out]``, as `SplitLogits`. Collective."""
        if input.dim() < 2 or self._smp_inside or _has_hooks(self):
            return super().forward(input)
        dim = 0 if self._has_own else None
        layout = self._smp_layout
        [local] = regions.gathered_linears(
            input, [self._matrix()], [self.bias], dim, fp8=fp8_of(self)
        )
        return SplitLogits(local, Vocabulary(layout, tuple(self._smp_sizes)))


def _has_hooks(module: nn.Module) -> bool:
    """Returns whether hooks read the module's output and expect a tensor."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


def hand_out_whole(model: nn.Module) -> None:
    """Makes a model return whole logits to its callers instead of `SplitLogits`.

    In a result with a loss they are gathered when they are read, else at once.

    Args:
        model: model of transformers whose head is a `PlannedHead`.
    """
    forward = model.__dict__.get("forward")
    inner: Callable[..., Any] = type(model).forward if forward is None else forward.__func__
    # A bound method, so that a deep copy has its own.
    model.__dict__["forward"] = types.MethodType(_handing_out(inner), model)


def _handing_out(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _handed_out(inner(self, *args, **kwargs))

    return forward


def _handed_out(output: Any) -> Any:
    if isinstance(output, SplitLogits):
        return output.whole()
    if type(output) in (tuple, list):
        return type(output)(_handed_out(item) for item in output)
    if type(output) is dict:
        return {key: _handed_out(item) for key, item in output.items()}
    if not isinstance(output, OrderedDict) or is_lazy(output):
        return output
    entries = dict(output.items())
    has_loss = isinstance(entries.get("loss"), Tensor)
    waiting = entries.get("logits") if has_loss else None
    for name, value in entries.items():
        if isinstance(value, SplitLogits) and value is not waiting:
            entries[name] = output[name] = value.whole()
    return lazy_result(type(output), entries) if isinstance(waiting, SplitLogits) else output
