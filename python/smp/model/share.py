"""The share of the running microbatch in the batch."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp.data_parallel import BatchWeights
from smp.nn.huggingface.outputs import is_lazy, ready_entries


class Share:
    """The share of one microbatch in the batch.

    Args:
        weights: weights of the microbatches of this rank; None: the first pipeline rank has them.
        mb: number of the microbatch.

    Attributes:
        outputs: nodes that receive gradients of the models' outputs, as (node, output number).
        is_in_backward: whether a backward that began with the share runs.
    """

    def __init__(self, weights: BatchWeights | None, mb: int) -> None:
        self._weights = weights
        self._mb = mb
        self._told: float | None = None
        self.outputs: set[tuple[Any, int]] = set()
        self.is_in_backward = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Marks a backward that began with the share, so that nested ones do not apply it again."""
        before, self.is_in_backward = self.is_in_backward, True
        try:
            yield
        finally:
            self.is_in_backward = before

    @property
    def counts_nothing(self) -> bool:
        """True if the weight is 0: the loss may be 0 / 0, and 0 times its gradients NaN."""
        return self._weights is not None and self._weights.counts_nothing(self._mb)

    def note_outputs(self, output: Any) -> None:
        """Notes which nodes receive gradients of a model's output; zeroes these for weight 0."""
        if self.counts_nothing:
            # Logits that are not gathered yet have samples of other ranks, which count.
            own = list(ready_entries(output).values()) if is_lazy(output) else output
            for leaf in pytree.tree_leaves(own):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(torch.zeros_like)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                with torch._C.DisableTorchFunctionSubclass():
                    self.outputs.add((leaf.grad_fn, leaf.output_nr))
        self.outputs.discard((None, 0))

    @property
    def of_loss(self) -> float:
        """Factor of the microbatch's loss in the loss of the global batch."""
        return 1.0 if self._weights is None else self._weights.share(self._mb)

    @property
    def weight(self) -> float:
        """Weight of the microbatch's outputs in their mean, 1 where all count alike."""
        if self._weights is not None:
            return self._weights.output_weight(self._mb)
        return 1.0 if self._told is None else self._told

    @weight.setter
    def weight(self, value: float) -> None:
        self._told = value


_share: contextvars.ContextVar[Share | None] = contextvars.ContextVar(
    "smp_microbatch_share", default=None
)


def set_share(share: Share) -> None:
    """Sets the share of the microbatch that this context runs."""
    _share.set(share)


def current_share() -> Share | None:
    """Returns the share of the running microbatch, or None outside of step functions."""
    return _share.get()
