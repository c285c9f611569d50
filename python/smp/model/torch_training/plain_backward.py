"""``loss.backward()`` inside of step functions, in the place of ``model.backward(loss)``.

A backward begins with the share of its microbatch in the loss of the global batch. So does
PyTorch's own backward if it reaches a distributed model. A small net that learns by itself inside
of a step function does not depend on the batch of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from smp.model.backward_roots import is_one, is_zero, torch_backward, weighted
from smp.model.share import Share, current_share
from smp.model.torch_training.known import known_parameters
from smp.pipeline import resolve
from smp.world import runtime


class PlainBackward:
    """Replaces ``torch.autograd.backward`` until the run is shut down.

    Args:
        current: the runtime, whose models count.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._wrapped = current.wrapped
        sizes = current.rank.sizes
        self._is_collective = sizes["tp"] > 1 or sizes["shard"] > 1
        torch.autograd.backward = self._backward
        current.on_shutdown(self._give_back)

    def _give_back(self) -> None:
        torch.autograd.backward = torch_backward

    def _backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        share = current_share()
        if share is None or share.is_in_backward:
            torch_backward(tensors, grad_tensors, *args, **kwargs)
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        factor = share.of_loss
        if is_one(factor) or not self._reaches_model(share, roots):
            torch_backward(tensors, grad_tensors, *args, **kwargs)
            return
        if is_zero(factor) and not self._is_collective:
            return
        grads = [grad_tensors] if isinstance(grad_tensors, Tensor | None) else list(grad_tensors)
        if len(grads) == 1:
            grads *= len(roots)
        roots, grads = weighted(roots, grads, factor, False)
        with share.backward():
            torch_backward(roots, grads, *args, **kwargs)

    def _reaches_model(self, share: Share, roots: Iterable[Tensor]) -> bool:
        """Returns whether the graph has an output or a parameter of a model."""
        known = known_parameters(self._wrapped)
        with torch._C.DisableTorchFunctionSubclass():
            stack = [(root.grad_fn, root.output_nr) for root in map(resolve, roots)]
        seen: set[Any] = set()
        while stack:
            node, number = stack.pop()
            if (node, number) in share.outputs:
                return True
            if node is None or node in seen:
                continue
            seen.add(node)
            if id(getattr(node, "variable", None)) in known:
                return True
            stack += node.next_functions
        return False
