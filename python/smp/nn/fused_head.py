"""Heads of transformers models whose loss is computed without logits.

The code of the model stays. Inside of its forward the head returns `HeldLogits`, which the model's
loss function exchanges for a loss: the head is called with targets then, on the rank that owns it.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import smp._C as _C
from smp.nn.held_logits import HeldLogits
from smp.nn.huggingface.outputs import is_lazy, lazy_result
from smp.nn.linear_cross_entropy import linear_cross_entropy
from smp.nn.planned.head import PlannedHead
from smp.nn.planned.logits import SplitLogits
from smp.tensor_parallel import reading, regions, sharding

_here = threading.local()


@contextmanager
def _in_model() -> Iterator[None]:
    before = getattr(_here, "depth", 0)
    _here.depth = before + 1
    try:
        yield
    finally:
        _here.depth = before


def _is_in_model() -> bool:
    return getattr(_here, "depth", 0) > 0


class _HeadWithLoss(nn.Linear):
    """A head that returns `HeldLogits` to the code of its model, and computes the loss for them.

    Attributes:
        _smp_recomputes: logits are computed again in backward.
    """

    _smp_recomputes: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_in_model() and len(args) == 1 and not kwargs:
            return HeldLogits(self, args[0])
        return super().__call__(*args, **kwargs)

    def logits_of(self, hidden: Tensor) -> Any:
        return super().__call__(hidden)

    def loss_of(self, hidden: Tensor, targets: Tensor, ignore_index: int, divisor: Any) -> Tensor:
        if self._forward_hooks or self._backward_hooks or self._backward_pre_hooks:
            raise RuntimeError(
                f"{_C.rank_prefix()}the head of the model has hooks, which expect logits that "
                "fused_linear_cross_entropy does not compute; remove them, or set it to False in "
                "the configuration"
            )
        loss: Tensor = self(hidden, targets=targets, ignore_index=ignore_index, divisor=divisor)
        return loss


class FusedHead(_HeadWithLoss):
    """A whole head."""

    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        ignore_index: int = 0,
        divisor: Any = None,
    ) -> Tensor:
        """Returns logits ``[*, out]``; or with targets ``[*]`` the loss, in float32."""
        if targets is None:
            return super().forward(input)
        loss = linear_cross_entropy(
            input,
            self.weight,
            targets,
            bias=self.bias,
            ignore_index=ignore_index,
            reduction="mean" if divisor is None else "sum",
            recompute=self._smp_recomputes,
        )
        return _divided(loss, divisor).float()


class FusedPlannedHead(_HeadWithLoss, PlannedHead):
    """A head of which each rank has its part of the vocabulary."""

    @reading.own_code
    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        ignore_index: int = 0,
        divisor: Any = None,
    ) -> Any:
        """Returns logits as `PlannedHead`; or with targets ``[N, S]`` the loss. Collective."""
        if targets is None:
            return PlannedHead.forward(self, input)
        counted = (targets != ignore_index).sum()
        sizes = list(self._smp_sizes)
        if self._has_own:
            input = regions.gather(input, 0, grad="sum")
            targets = regions.gather(targets, 0, grad="own")
        else:
            input = regions.copy(input)
        losses = linear_cross_entropy(
            input,
            self._matrix(),
            targets,
            bias=self.bias,
            ignore_index=ignore_index,
            reduction="none",
            begin=sharding.begin_of(sizes),
            vocab_size=sum(sizes),
        )
        own = regions.scatter(losses, 0) if self._has_own else losses
        return _divided(own.sum(), counted if divisor is None else divisor).float()


def _divided(loss: Tensor, divisor: Any) -> Tensor:
    if divisor is None:
        return loss
    return loss / (divisor.to(loss.device) if isinstance(divisor, Tensor) else divisor)


def fuse_loss(model: Any, head: nn.Linear, recomputes: bool) -> None:
    """Makes a causal language model of transformers compute its loss without logits.

    Args:
        model: model whose loss function is that of transformers.
        head: head of the model, an ``nn.Linear`` or a `PlannedHead`.
        recomputes: logits are computed again in backward, see `linear_cross_entropy`.
    """
    head.__class__ = FusedPlannedHead if isinstance(head, PlannedHead) else FusedHead
    head.__dict__["_smp_recomputes"] = recomputes
    original = model.loss_function
    fused: Any = functools.partial(_loss, original)
    fused.__wrapped__ = original  # code that inspects the loss sees transformers' own
    model.loss_function = fused
    forward = model.__dict__.get("forward")
    inner: Callable[..., Any] = type(model).forward if forward is None else forward.__func__
    # The method is bound, so that a deep copy has its own.
    model.__dict__["forward"] = types.MethodType(_handing_out(inner), model)


def _loss(
    original: Callable[..., Tensor],
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Replaces ``ForCausalLMLoss`` of transformers, with its arguments."""
    if not isinstance(logits, HeldLogits):
        if _is_in_model():
            raise RuntimeError(
                f"{_C.rank_prefix()}the code of the model computes its loss from other values than "
                "its head returns (a scale or a cap of logits, for example), which "
                "fused_linear_cross_entropy cannot do; set it to False in the configuration"
            )
        return original(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    return logits.loss(shift_labels, ignore_index, num_items_in_batch)


def _handing_out(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _in_model():
            output = inner(self, *args, **kwargs)
        return _handed_out(output)

    return forward


def _handed_out(output: Any) -> Any:
    """Returns a result with logits in it, unless a loss took their place."""
    if isinstance(output, HeldLogits):
        return output if output.is_spent else _whole(output.logits)
    if type(output) in (tuple, list):
        return type(output)(_handed_out(item) for item in output)
    if not isinstance(output, OrderedDict) or is_lazy(output):
        return output
    for name, value in list(output.items()):
        if isinstance(value, HeldLogits) and not value.is_spent:
            output[name] = _whole(value.logits)
    entries = dict(output.items())
    is_spent = isinstance(entries.get("logits"), HeldLogits)
    return lazy_result(type(output), entries) if is_spent else output


def _whole(logits: Any) -> Tensor:
    whole: Tensor = logits.whole() if isinstance(logits, SplitLogits) else logits
    return whole
