"""Builds the module tree of a model, in the form that the C++ partitioner reads."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

import smp._C as _C
from smp.modules import packed
from smp.modules.module_writes import ModuleWrites
from smp.partition.costs import Trace
from smp.tensor_parallel import regions, sharding

# These read the parameters of their children instead of calling them. A child on another rank
# would never be called, and one with slices of its parameters would be taken for a small one.
READS_CHILDREN = nn.MultiheadAttention | nn.TransformerEncoderLayer


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several modules hold.

    Attributes:
        owner_idx: the first module that holds it; its bytes count there.
        owner_name: the parameter's name in that module.
        alias_idx: another module.
        alias_name: the parameter's name there.
    """

    owner_idx: int
    owner_name: str
    alias_idx: int
    alias_name: str


@dataclass(frozen=True)
class ModuleIndex:
    """The distinct modules of a model, parents first, in registration order; 0 is the root.

    A module that is registered twice is one node, at its first place.

    Attributes:
        tree: the same nodes for the partitioner.
        modules: module per node.
        parents: parent's index per node; -1 for the root.
        names: all qualified names per node, the first place first; "" is the root.
        shared: parameters that tie nodes to each other.
        has_parameters: whether there is a parameter in the subtree of a node.
        is_stateless: whether there is neither parameter nor buffer in the subtree of a node.
        anchors: top-most node above that keeps its whole subtree, or the node itself.
        writes: attributes that forwards write, with indices of nodes; empty without a trace.
    """

    tree: _C.ModuleTree
    modules: tuple[nn.Module, ...]
    parents: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    shared: tuple[SharedParameter, ...]
    has_parameters: tuple[bool, ...]
    is_stateless: tuple[bool, ...]
    anchors: tuple[int, ...]
    writes: ModuleWrites = ModuleWrites()


def build_tree(
    root: nn.Module, trace: Trace | None = None, whole: Container[nn.Module] = ()
) -> ModuleIndex:
    """Lists the modules of a model with their parameter bytes, ties and costs.

    Each parameter counts once, at the first module that holds it. Modules that hold one parameter
    are tied. Modules without parameters do not affect the partition and follow their parent.

    Args:
        root: any module; parameters may be on the meta device.
        trace: trace of the same model; without it only parameter sizes are known.
        whole: modules that are not cut, besides those that cannot be.
    """
    modules, parents, first_names = _walk(root)
    index_of = {module: idx for idx, module in enumerate(modules)}
    all_names: list[list[str]] = [[] for _ in modules]
    for name, module in root.named_modules(remove_duplicate=False):
        all_names[index_of[module]].append(name)

    tree = _C.ModuleTree()
    owners: dict[nn.Parameter, tuple[int, str]] = {}
    shared: list[SharedParameter] = []
    has_parameters = [False] * len(modules)
    has_buffers = [False] * len(modules)
    anchors: list[int] = []
    uncut: list[bool] = []
    for idx, module in enumerate(modules):
        param_bytes = 0
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            has_parameters[idx] = True
            owner_idx, owner_name = owners.setdefault(parameter, (idx, name))
            if owner_idx != idx:
                shared.append(SharedParameter(owner_idx, owner_name, idx, name))
            elif owner_name == name:
                param_bytes += _bytes_of(parameter)
        has_buffers[idx] = any(True for _ in module.buffers(recurse=False))
        kind = _C.NodeKind.INDIVISIBLE if module in whole else kind_of(module)
        uncut.append(kind == _C.NodeKind.INDIVISIBLE)
        tree.add_node(
            first_names[idx],
            parents[idx],
            param_bytes,
            has_parameters[idx],
            kind=kind,
        )
        above = anchors[parents[idx]] if idx > 0 else 0
        anchors.append(above if idx > 0 and uncut[above] else idx)
    for tie in shared:
        tree.tie(tie.owner_idx, tie.alias_idx)
    if trace is not None:
        _tie_users(tree, trace, modules, index_of)
    further = _further_places(root, index_of, parents)
    if trace is not None:
        further |= _add_trace(tree, trace, index_of, parents)
    for parent_idx, idx in sorted(further):
        tree.add_alias(parent_idx, idx)

    for idx in range(len(modules) - 1, 0, -1):
        has_parameters[parents[idx]] |= has_parameters[idx]
        has_buffers[parents[idx]] |= has_buffers[idx]
    return ModuleIndex(
        tree=tree,
        modules=tuple(modules),
        parents=tuple(parents),
        names=tuple(map(tuple, all_names)),
        shared=tuple(shared),
        has_parameters=tuple(has_parameters),
        is_stateless=tuple(not (p or b) for p, b in zip(has_parameters, has_buffers, strict=True)),
        anchors=tuple(anchors),
        writes=ModuleWrites() if trace is None else _writes_of(trace, index_of),
    )


def _writes_of(trace: Trace, index_of: dict[nn.Module, int]) -> ModuleWrites:
    return trace.writes.renumbered([index_of[module] for module in trace.modules])


def _tie_users(
    tree: _C.ModuleTree,
    trace: Trace,
    modules: Sequence[nn.Module],
    index_of: Mapping[nn.Module, int],
) -> None:
    """Ties modules that read parameters of others, or use what changes in place.

    A small module that does so with modules below it stays whole. Leaves of the tree are put on
    one rank. The code of other modules is brought to the first rank, where the code of split
    modules runs, by tying the smallest module below them to the root.
    """
    idxs = [index_of[module] for module in trace.modules]
    small = sum(_bytes_of(p) for p in modules[0].parameters()) / 4
    pairs = {(pair, True) for pair in trace.parameter_reads}
    pairs |= {(pair, False) for pair in trace.writes.ties}
    for (trace_user, trace_idx), reads_parameter in sorted(pairs):
        user, idx = idxs[trace_user], idxs[trace_idx]
        if user != 0 and modules[idx] in modules[user].children():
            if sum(_bytes_of(p) for p in modules[user].parameters()) <= small:
                _keep_whole(tree, modules[user], index_of)
                continue
        if reads_parameter or (_is_leaf(modules[user]) and _is_leaf(modules[idx])):
            # A module without parameters of its own is called in a way that cannot travel.
            own = any(True for _ in modules[idx].parameters(recurse=False))
            for part in [idx] if own else _holders_below(modules[idx], index_of):
                tree.tie(user, part)
            continue
        for module in (modules[user], modules[idx]):
            if (smallest := smallest_below(module)) is not None:
                tree.tie(0, index_of[smallest])


def _keep_whole(tree: _C.ModuleTree, module: nn.Module, index_of: Mapping[nn.Module, int]) -> None:
    first, *others = _holders_below(module, index_of)
    for other in others:
        tree.tie(first, other)


def _holders_below(module: nn.Module, index_of: Mapping[nn.Module, int]) -> list[int]:
    """Returns those of a module and the modules below with parameters of their own."""
    return [
        index_of[part]
        for part in module.modules()
        if any(True for _ in part.parameters(recurse=False))
    ]


def _is_leaf(module: nn.Module) -> bool:
    own = any(True for _ in module.parameters(recurse=False))
    return own and not any(True for child in module.children() for _ in child.parameters())


def smallest_below(module: nn.Module) -> nn.Module | None:
    """Returns the module here or below with the fewest bytes of own parameters, or None."""
    sizes = {
        child: sum(_bytes_of(p) for p in child.parameters(recurse=False))
        for child in module.modules()
    }
    with_own = [child for child, num_bytes in sizes.items() if num_bytes]
    return min(with_own, key=sizes.__getitem__, default=None)


def _bytes_of(parameter: nn.Parameter) -> int:
    """Returns a rank's bytes of a parameter; the mean if tensor-parallel ranks hold parts of it.

    Their parts may differ in size, and all ranks have to decide alike.
    """
    if sharding.interval_of(parameter) is None:
        return packed.num_bytes(parameter)
    whole = math.prod(sharding.whole_shape(parameter)) * parameter.element_size()
    return whole // regions.size()


def _further_places(
    root: nn.Module, index_of: dict[nn.Module, int], parents: list[int]
) -> set[tuple[int, int]]:
    """Returns (parent, module) for each further place where a module is registered."""
    return {
        (parent_idx, index_of[child])
        for parent, parent_idx in index_of.items()
        for child in parent._modules.values()
        if child is not None and parents[index_of[child]] != parent_idx
    }


def _add_trace(
    tree: _C.ModuleTree, trace: Trace, index_of: dict[nn.Module, int], parents: list[int]
) -> set[tuple[int, int]]:
    """Adds the results of a trace to the tree.

    Returns:
        (caller, module) pairs in which the caller is not above the module.
    """
    idxs = [index_of[module] for module in trace.modules]
    for idx, cost in zip(idxs, trace.costs, strict=True):
        tree.set_costs(idx, cost.compute, cost.activation_bytes, cost.forward_compute)
    tree.set_order([idxs[i] for i in trace.order])
    _add_values(tree, trace, idxs)
    tree.compute_per_byte = trace.cost_per_link_byte
    return {
        (idxs[caller], idxs[called])
        for caller, called in trace.calls
        if not _is_above(idxs[caller], idxs[called], parents)
    }


def _add_values(tree: _C.ModuleTree, trace: Trace, idxs: list[int]) -> None:
    """Adds the values that may cross a boundary, and the values that they are made of.

    A value that is left to the rank with the data has costs there, and crosses to its own maker.
    """
    used = [
        any(c != value.producer or value.sources for c in value.consumers)
        or value.flops > 0
        or value.activation_bytes > 0
        for value in trace.values
    ]
    for i in reversed(range(len(used))):
        if used[i]:
            for source in trace.values[i].sources:
                used[source] = True
    new_ids: dict[int, int] = {}
    for i, value in enumerate(trace.values):
        if used[i]:
            cost = trace.costs[value.producer]
            flops = cost.forward_flops + cost.backward_flops
            new_ids[i] = tree.add_value(
                idxs[value.producer],
                value.num_bytes,
                [idxs[c] for c in value.consumers],
                value.needs_grad,
                [new_ids[source] for source in value.sources],
                cost.compute * value.flops / flops if flops else 0.0,
                value.activation_bytes,
            )


def _is_above(idx: int, other_idx: int, parents: list[int]) -> bool:
    while other_idx >= 0:
        if other_idx == idx:
            return True
        other_idx = parents[other_idx]
    return False


def _walk(root: nn.Module) -> tuple[list[nn.Module], list[int], list[str]]:
    """Returns distinct modules in depth-first order, with parent index and first name."""
    modules: list[nn.Module] = []
    parents: list[int] = []
    names: list[str] = []
    seen: set[nn.Module] = set()
    stack: list[tuple[nn.Module, int, str]] = [(root, -1, "")]
    while stack:
        module, parent_idx, name = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        idx = len(modules)
        modules.append(module)
        parents.append(parent_idx)
        names.append(name)
        prefix = f"{name}." if name else ""
        children = [(child, idx, prefix + key) for key, child in module.named_children()]
        stack.extend(reversed(children))
    return modules, parents, names


def kind_of(module: nn.Module) -> _C.NodeKind:
    """Returns how the partitioner may cut a module."""
    if isinstance(module, torch.jit.ScriptModule | READS_CHILDREN):
        return _C.NodeKind.INDIVISIBLE
    if parametrize.is_parametrized(module) or getattr(module, "is_indivisible", False) is True:
        return _C.NodeKind.INDIVISIBLE
    if packed.has_adapters(module):
        return _C.NodeKind.INDIVISIBLE
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return _C.NodeKind.LIST
    return _C.NodeKind.PLAIN
