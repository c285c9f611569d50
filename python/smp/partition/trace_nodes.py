"""Charges backwards of operators that run inside of an autograd node, without gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from smp.modules.operators import memory_of


class NodeBackwards:
    """The backward costs of nodes, by the operators of their forwards.

    The forward of a `torch.autograd.Function`, and of a node of C++, runs without gradients, as
    code under `torch.no_grad` does. Only the result of the node shows the difference: it has a
    graph. So the cost of each operator waits until a tensor made from it needs a gradient.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, float] | None] = []  # module and cost; None once charged
        self._made_by: dict[StorageWeakRef, frozenset[int]] = {}

    def needs_grad(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        """Returns the inputs of an operator that its backward would give gradients to."""
        if torch.is_grad_enabled():
            return [tensor for tensor in inputs if tensor.requires_grad]
        return [t for t in inputs if t.requires_grad or self._made_by.get(memory_of(t))]

    def ran(
        self, idx: int, inputs: Iterable[Tensor], outputs: Iterable[Tensor], cost: float
    ) -> None:
        """Notes an operator that ran without gradients, in the code of a module.

        Args:
            idx: index of the module.
            inputs, outputs: tensors of the operator.
            cost: cost of its backward.
        """
        before = frozenset[int]().union(*(self._made_by.get(memory_of(t), ()) for t in inputs))
        for tensor in outputs:
            self._made_by[memory_of(tensor)] = before | {len(self._waiting)}
        self._waiting.append((idx, cost))

    def seen(self, tensors: Iterable[Tensor]) -> list[tuple[int, float]]:
        """Returns modules and costs that are now certain, since these tensors need gradients."""
        certain = []
        for tensor in tensors:
            if tensor.requires_grad and self._made_by:
                for number in self._made_by.pop(memory_of(tensor), ()):
                    waiting = self._waiting[number]
                    if waiting is not None:
                        certain.append(waiting)
                        self._waiting[number] = None
        return certain
