"""Watches the driver's first microbatch: the model's outputs, and gradients into them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp.observe.verification.recorder import leaves_of
from smp.observe.verification.rows import Row, row_of
from smp.pipeline import resolve
from smp.pipeline.remote_tensor import RemoteTensor

_MAX_FETCHED = 1 << 20  # elements of an output that is fetched for the check alone
_MAX_NODES = 200_000

#: node of the graph, and number of its output
Edge = tuple[Any, int]


class Inconclusive(Exception):
    """The check has no result for this model; the text is the reason."""


@dataclass
class Output:
    """A leaf of the model's output.

    Attributes:
        value: the leaf.
        form: shape and dtype, or another value, in words.
        row: numbers that are in this process.
        edge: edge into the leaf in the graph.
        can_hook: whether a hook sees its gradient.
    """

    value: Any
    form: str
    row: Row | None
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
        self._argument_edges: list[Edge] = []
        self._grads: dict[tuple[int, int], list[Tensor]] = {}
        self._met: set[tuple[int, int]] = set()
        self._inside: set[Any] | None = None

    def note_call(self, arguments: Any, output: Any) -> None:
        """Records the output of a call of the model."""
        number = len(self.outputs)
        self._inside = None
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._argument_edges += [e for e in map(_edge_of, tensors) if e is not None]
        self.outputs.append(
            [self._output(leaf, (number, i)) for i, leaf in enumerate(leaves_of(output))]
        )

    def _output(self, leaf: Any, key: tuple[int, int]) -> Output:
        if isinstance(leaf, Tensor):
            leaf = resolve(leaf)  # a handle may have been changed in place
        edge = _edge_of(leaf) if isinstance(leaf, Tensor) else None
        is_view = isinstance(leaf, RemoteTensor) and leaf._whole is not None
        can_hook = edge is not None and not is_view and not _is_leaf(leaf)
        if can_hook:
            grads = self._grads.setdefault(key, [])

            def keep(grad: Tensor | None) -> None:
                if grad is not None:
                    grads.append(grad if isinstance(grad, RemoteTensor) else grad.detach().clone())

            leaf.register_hook(keep)
        return Output(leaf, form_of(leaf), row_of(leaf), edge, can_hook)

    def note_backward(self, roots: Sequence[Any]) -> None:
        """Records that a backward begins.

        Raises:
            Inconclusive: it reaches the model by other ways than its outputs.
        """
        self.has_backward = True
        starts = [_edge_of(resolve(root)) for root in roots if isinstance(root, Tensor)]
        keys: dict[Edge, tuple[int, int]] = {}
        for number, outputs in enumerate(self.outputs):
            for position, output in enumerate(outputs):
                if output.edge is not None:
                    keys.setdefault(output.edge, (number, position))
        # Outputs of one call may be arguments of another one.
        passed, met = _reached([*starts, *self._argument_edges], keys)
        if self._inside is None:
            arguments = set(self._argument_edges)
            first = [(edge[0], -1) for edge in keys if edge not in arguments]
            self._inside, _ = _reached(first, arguments)
        for node in passed:
            if node in self._inside or _is_call_without_inputs(node) or self._is_own(node):
                raise Inconclusive(
                    "a backward reaches the model by other ways than what it returned (attributes, "
                    "parameters)"
                )
        self._met |= {keys[edge] for edge in met}

    def _is_own(self, node: Any) -> bool:
        variable = getattr(node, "variable", None)
        return variable is not None and id(variable) in self._parameters

    def incoming(self) -> dict[tuple[int, int], Tensor]:
        """Returns gradients that flow into outputs from outside the model; runs in a context.

        Raises:
            Inconclusive: the gradients are not known.
        """
        found: dict[tuple[int, int], Tensor] = {}
        for number, position in sorted(self._met):
            if not self.outputs[number][position].can_hook:
                raise Inconclusive("an output is a view of a tensor on another rank")
            for grad in self._grads[number, position]:
                value = grad._data() if isinstance(grad, RemoteTensor) else grad
                known = found.get((number, position))
                found[number, position] = value.clone() if known is None else known + value
        return found

    def are_independent(self) -> bool:
        """Returns whether no output that a backward begins at is computed from another one."""
        edges = [self.outputs[number][position].edge for number, position in self._met]
        return are_independent([edge for edge in edges if edge is not None])

    def fetch(self) -> None:
        """Fetches outputs from other ranks; runs in a context."""
        for output in itertools.chain(*self.outputs):
            value = output.value
            if isinstance(value, RemoteTensor) and value.is_untouched():
                if value.numel() <= _MAX_FETCHED:
                    output.row = row_of(value._data())

    def forget(self) -> None:
        """Frees the step's graph."""
        for output in itertools.chain(*self.outputs):
            output.value = output.edge = None
        self._grads.clear()
        self._argument_edges.clear()
        self._inside = None


def form_of(value: Any) -> str:
    """Describes what must be equal of a leaf besides its numbers."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return str(value) if isinstance(value, bool | int | type(None)) else "another object"


def _edge_of(tensor: Tensor) -> Edge | None:
    """Returns the edge that a tensor's gradient flows to; None without gradients."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.requires_grad:
            return None
        if tensor.grad_fn is not None:
            return tensor.grad_fn, tensor.output_nr
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        return edge.node, edge.output_nr


def _is_leaf(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn is None


def _is_call_without_inputs(node: Any) -> bool:
    """Returns whether a node is a call on another rank whose gradient ends in the called module."""
    return "RemoteCall" in node.name() and all(below is None for below, _ in node.next_functions)


def _reached(starts: Iterable[Edge | None], stops: Iterable[Edge]) -> tuple[set[Any], set[Edge]]:
    """Finds the nodes that a backward from ``starts`` passes.

    Args:
        starts: edges where it begins; a start that is also a stop is not passed.
        stops: edges that it does not go beyond.

    Returns:
        nodes that were passed; stops that were met.

    Raises:
        Inconclusive: the graph has too many nodes.
    """
    ends = set(stops)
    passed: set[Any] = set()
    met: set[Edge] = set()
    stack = [edge for edge in starts if edge is not None]
    while stack:
        edge = stack.pop()
        node = edge[0]
        if edge in ends:
            met.add(edge)
        elif node not in passed:
            passed.add(node)
            if len(passed) > _MAX_NODES:
                raise Inconclusive("the graph of the loss is too large")
            stack += [below for below in node.next_functions if below[0] is not None]
    return passed, met


def are_independent(edges: Sequence[Edge]) -> bool:
    """Returns whether all edges are different, and none is computed from another one."""
    for i, (node, _) in enumerate(edges):
        others = [*edges[:i], *edges[i + 1 :]]
        below = [edge for edge in node.next_functions if edge[0] is not None]
        if any(node is other for other, _ in others) or _reached(below, others)[1]:
            return False
    return True


def runs_own_backward(edges: Sequence[Edge]) -> bool:
    """Returns whether a function in Python, such as a reentrant checkpoint, is in the graph.

    Such a function may run a backward of its own, whose graph is not in that of its caller.
    """
    own = torch.autograd.function.BackwardCFunction
    return any(isinstance(node, own) for node in _reached(edges, ())[0])
