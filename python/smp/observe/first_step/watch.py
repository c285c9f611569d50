"""Watches the driver's first microbatch: the model's outputs, and gradients into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp.observe.first_step.outside import (
    Edge,
    TooLarge,
    are_independent,
    edge_of,
    is_call_without_inputs,
    reached,
)
from smp.observe.first_step.records import leaves_of
from smp.observe.first_step.reference import Inconclusive
from smp.observe.first_step.sketch import is_plain, sketch
from smp.pipeline import resolve
from smp.pipeline.remote_tensor import RemoteTensor

_MAX_FETCHED = 1 << 20  # elements of an output that is fetched for the check alone


@dataclass
class Output:
    """A leaf of the model's output."""

    value: Any
    sketch: Tensor | None
    edge: Edge | None
    can_hook: bool


class RealCalls:
    """The outputs of the model, and the gradients that flow back into them.

    Attributes:
        outputs: leaves of the output, for each call.
        has_backward: whether a backward has begun.
    """

    def __init__(self, root: nn.Module) -> None:
        self._parameters = {id(p) for p in root.parameters()}
        self.outputs: list[list[Output]] = []
        self.has_backward = False
        self._argument_edges: list[list[Edge]] = []
        self._grads: dict[tuple[int, int], list[Tensor]] = {}
        self._met: set[tuple[int, int]] = set()
        self._inside: set[Any] | None = None

    def note_call(self, arguments: Any, output: Any) -> None:
        """Notes the output of a call of the model."""
        number = len(self.outputs)
        self._inside = None
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._argument_edges.append([e for e in map(edge_of, tensors) if e is not None])
        own = []
        for position, leaf in enumerate(leaves_of(output)):
            if isinstance(leaf, Tensor):
                leaf = resolve(leaf)  # a handle may have been changed in place
            edge = edge_of(leaf) if isinstance(leaf, Tensor) else None
            is_view = isinstance(leaf, RemoteTensor) and leaf._whole is not None
            can_hook = edge is not None and not is_view and not _is_leaf(leaf)
            if can_hook:
                self._hook(leaf, (number, position))
            own.append(Output(leaf, sketch(leaf) if is_plain(leaf) else None, edge, can_hook))
        self.outputs.append(own)

    def _hook(self, tensor: Tensor, key: tuple[int, int]) -> None:
        grads = self._grads.setdefault(key, [])

        def keep(grad: Tensor | None) -> None:
            if grad is not None:
                grads.append(grad if isinstance(grad, RemoteTensor) else grad.detach().clone())

        tensor.register_hook(keep)

    def note_backward(self, roots: Sequence[Any]) -> None:
        """Notes that a backward begins.

        Raises:
            Inconclusive: it reaches the model by other ways than its outputs.
        """
        self.has_backward = True
        starts = [edge_of(resolve(root)) for root in roots if isinstance(root, Tensor)]
        keys: dict[Edge, tuple[int, int]] = {}
        for number, outputs in enumerate(self.outputs):
            for position, output in enumerate(outputs):
                if output.edge is not None:
                    keys.setdefault(output.edge, (number, position))
        try:
            # Outputs of one call may be arguments of another one.
            passed, met = reached([*starts, *sum(self._argument_edges, [])], keys)
            if self._inside is None:
                arguments = set(sum(self._argument_edges, []))
                first = [(edge[0], -1) for edge in keys if edge not in arguments]
                self._inside, _ = reached(first, arguments)
        except TooLarge:
            raise Inconclusive("the graph of the loss is too large") from None
        for node in passed:
            if node in self._inside or is_call_without_inputs(node) or self._is_own(node):
                raise Inconclusive(
                    "a backward reaches the model by other ways than what it returned (attributes, "
                    "parameters)"
                )
        self._met |= {keys[edge] for edge in met}

    def _is_own(self, node: Any) -> bool:
        variable = getattr(node, "variable", None)
        return variable is not None and id(variable) in self._parameters

    def incoming(self) -> dict[tuple[int, int], Tensor | None]:
        """Returns gradients that flow into outputs from outside the model; runs in a context.

        Raises:
            Inconclusive: the gradients are not known.
        """
        found: dict[tuple[int, int], Tensor | None] = {}
        for number, position in sorted(self._met):
            if not self.outputs[number][position].can_hook:
                raise Inconclusive("an output is a view of a tensor on another rank")
            total: Tensor | None = None
            for grad in self._grads[number, position]:
                value = grad._data() if isinstance(grad, RemoteTensor) else grad
                total = value.clone() if total is None else total + value
            found[number, position] = total
        return found

    def are_independent(self) -> bool:
        """Returns whether no output that a backward begins at is computed from another one."""
        edges = [self.outputs[number][position].edge for number, position in self._met]
        return are_independent([edge for edge in edges if edge is not None])

    def fetch(self, unknown: Sequence[tuple[int, int]]) -> None:
        """Fetches outputs from other ranks and sketches them; runs in a context."""
        for number, position in unknown:
            output = self.outputs[number][position]
            value = output.value
            if isinstance(value, RemoteTensor) and value.is_untouched():
                if value.numel() <= _MAX_FETCHED:
                    output.sketch = sketch(value._data())

    def forget(self) -> None:
        """Frees the step's graph."""
        for outputs in self.outputs:
            for output in outputs:
                output.edge = None
                if isinstance(output.value, Tensor):
                    output.value = _Shape.of(output.value)
        self._grads.clear()
        self._argument_edges.clear()
        self._inside = None


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> _Shape:
        with torch._C.DisableTorchFunctionSubclass():
            return _Shape(tuple(tensor.shape), tensor.dtype)


def _is_leaf(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn is None


def describe_leaf(value: Any) -> tuple[Any, ...]:
    """Returns the facts about a leaf, other than its numbers, that must be equal."""
    if isinstance(value, Tensor):
        value = _Shape.of(value)
    if isinstance(value, _Shape):
        return ("tensor", value.shape, value.dtype)
    if isinstance(value, bool | int | type(None)):
        return ("value", value)
    return ("other",)
