"""Backwards of operators that run inside of an autograd node, where gradients are off."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class NodeBackwards:
    """What the backward of a node costs, by the operators of its forward.

    The forward of a `torch.autograd.Function`, and of a node of C++, runs without gradients, as
    code under `torch.no_grad` does. Only what the node has made tells them apart: it has a graph.
    So the cost of each operator waits until a tensor that comes of it is seen to need a gradient.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, float] | None] = []  # module and cost; None: charged
        self._made_by: dict[StorageWeakRef, frozenset[int]] = {}

    def needs_grad(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        """Inputs of an operator that its backward would give gradients to."""
        if torch.is_grad_enabled():
            return [tensor for tensor in inputs if tensor.requires_grad]
        return [t for t in inputs if t.requires_grad or self._made_by.get(_key(t))]

    def ran(
        self, idx: int, inputs: Iterable[Tensor], outputs: Iterable[Tensor], cost: float
    ) -> None:
        """An operator ran without gradients, in the code of a module.

        Args:
            idx: of the module.
            inputs, outputs: tensors of the operator.
            cost: of its backward.
        """
        before = frozenset[int]().union(*(self._made_by.get(_key(t), ()) for t in inputs))
        for tensor in outputs:
            self._made_by[_key(tensor)] = before | {len(self._waiting)}
        self._waiting.append((idx, cost))

    def seen(self, tensors: Iterable[Tensor]) -> list[tuple[int, float]]:
        """Modules and costs that are certain now, since these tensors need gradients."""
        certain = []
        for tensor in tensors:
            if tensor.requires_grad and self._made_by:
                for number in self._made_by.pop(_key(tensor), ()):
                    waiting = self._waiting[number]
                    if waiting is not None:
                        certain.append(waiting)
                        self._waiting[number] = None
        return certain


def _key(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
