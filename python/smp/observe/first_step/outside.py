"""Walks the graph between the outputs of a model and the roots of a backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_MAX_NODES = 200_000


class TooLarge(Exception):
    """The graph has too many nodes to be searched."""


#: node, and number of its output
Edge = tuple[Any, int]


def edge_of(tensor: Tensor) -> Edge | None:
    """Returns the edge that a tensor's gradient flows to; None without gradients."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.requires_grad:
            return None
        if tensor.grad_fn is not None:
            return tensor.grad_fn, tensor.output_nr
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        return edge.node, edge.output_nr


def reached(starts: Iterable[Edge | None], stops: Iterable[Edge]) -> tuple[set[Any], set[Edge]]:
    """Finds the nodes that a backward from ``starts`` passes.

    Args:
        starts: edges where it begins; a start that is also a stop is not passed.
        stops: edges that it does not go beyond.

    Returns:
        nodes that were passed; stops that were met.

    Raises:
        TooLarge: the graph has too many nodes.
    """
    ends = set(stops)
    seen: set[Any] = set()
    met: set[Edge] = set()
    stack = [edge for edge in starts if edge is not None]
    while stack:
        edge = stack.pop()
        if edge in ends:
            met.add(edge)
            continue
        node = edge[0]
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MAX_NODES:
            raise TooLarge
        stack += [below for below in node.next_functions if below[0] is not None]
    return seen, met


def is_call_without_inputs(node: Any) -> bool:
    """Returns whether a node is a call on another rank whose gradient ends in the called module."""
    return "RemoteCall" in node.name() and all(below is None for below, _ in node.next_functions)


def are_independent(edges: list[Edge]) -> bool:
    """Returns whether all edges are different, and none is computed from another one."""
    if len(set(edges)) < len(edges):
        return False
    for i, (node, _) in enumerate(edges):
        others = edges[:i] + edges[i + 1 :]
        below = [edge for edge in node.next_functions if edge[0] is not None]
        if others and (reached(below, others)[1] or any(node is other for other, _ in others)):
            return False
    return True
