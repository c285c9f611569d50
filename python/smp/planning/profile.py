"""A model as a chain of parts with what each costs for one sample: all that a plan asks of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from smp.partition.costs import Trace
from smp.partition.trace import trace
from smp.planning import tensor_split
from smp.planning.recomputed import layers_of, repeated_layers


@dataclass(frozen=True, eq=False)
class Part:
    """A layer, or what lies before the first one, between two, or behind the last one.

    Of one sample. Work is in seconds of a device that does one FLOP per second, and moves bytes as
    much slower than it computes as the device of the plan does.

    Attributes:
        name: of its first module.
        is_layer: one of the repeated ones, which checkpoints are put around.
        split_elements, whole_elements: of parameters that tensor parallelism divides, and others.
        tensors: elements of each parameter, and whether it is divided.
        split_forward, whole_forward: work of the forward that is divided, and that is not.
        split_backward, whole_backward: the same of the backward.
        split_kept, whole_kept: bytes of activations.
        input_bytes: what comes into it from the part before, with a gradient.
        largest_bytes: of the largest tensor that it makes.
        tied_elements: of parameters that a part before it has as well.
        num_products: pairs of columns and rows that are summed over ranks in a forward.
        num_mixtures: of these, experts that tokens are routed to.
        routed_kept: bytes of activations that experts keep, and that are whole on each rank unless
            experts are spread over the ranks; part of `whole_kept`.
    """

    name: str
    is_layer: bool
    split_elements: int = 0
    whole_elements: int = 0
    tensors: tuple[tuple[int, bool], ...] = ()
    split_forward: float = 0.0
    whole_forward: float = 0.0
    split_backward: float = 0.0
    whole_backward: float = 0.0
    split_kept: float = 0.0
    whole_kept: float = 0.0
    input_bytes: float = 0.0
    largest_bytes: float = 0.0
    tied_elements: int = 0
    num_products: int = 0
    num_mixtures: int = 0
    routed_kept: float = 0.0

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return self.split_elements + self.whole_elements

    @property
    def costs(self) -> tuple[object, ...]:
        """All but the name."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "name")


@dataclass(frozen=True)
class ModelProfile:
    """Parts in the order of execution.

    Attributes:
        parts: at least one.
        tail: work behind the last part that has to be where the first one is, because they share
            parameters (a head tied to the embedding); None if there is none.
        tokens: of a sample; 1 for a model that is not given tokens.
        heads: that tensor parallelism can divide; 0: not known.
        width: channels between layers; 0: not known.
        experts: of each mixture; 0: there is none.
        routed: experts that a token goes to.
    """

    parts: tuple[Part, ...]
    tail: Part | None
    tokens: int
    heads: int
    width: int
    experts: int = 0
    routed: int = 1

    @property
    def elements(self) -> int:
        """Parameters, shared ones once."""
        return sum(part.elements for part in (*self.parts, *([self.tail] if self.tail else [])))

    @property
    def forward(self) -> float:
        """Work of a forward."""
        chain = (*self.parts, *([self.tail] if self.tail else []))
        return sum(part.split_forward + part.whole_forward for part in chain)

    def repeated(self, num_layers: int) -> ModelProfile:
        """The same model with so many layers, all as its second one."""
        first = next(i for i, part in enumerate(self.parts) if part.is_layer)
        layers = [part for part in self.parts if part.is_layer]
        others = [part for part in self.parts[first:] if not part.is_layer]
        middle = [
            replace(layers[min(1, len(layers) - 1)], name=f"layer {i}") for i in range(num_layers)
        ]
        return replace(self, parts=(*self.parts[:first], *middle, *others))


def profile(
    root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], flops_per_byte: float
) -> ModelProfile:
    """Traces a model with one sample.

    Args:
        root: on the meta device, in the dtype that it computes in.
        args, kwargs: of a forward with one sample.
        flops_per_byte: of the device.
    Raises:
        TraceError: the forward raised.
    """
    traced = trace(root, args, kwargs, device=torch.device("cpu"), flops_per_byte=flops_per_byte)
    layers = repeated_layers(root)
    width = tensor_split.hidden_width(root)
    groups, owners = _groups(traced, layers)
    inputs = {layer.module: layer.input_bytes for layer in layers_of(traced, layers)}
    parts = [
        _part(
            traced, modules, width, name, top, inputs, owners, tensor_split.experts_per_token(root)
        )
        for name, top, modules in groups
    ]
    tail = None
    if len(parts) > 1 and _shares(traced, groups[0][2], groups[-1][2]):
        tail = parts.pop()
    config = getattr(root, "config", None)
    return ModelProfile(
        tuple(parts),
        tail,
        _tokens(args, kwargs),
        int(getattr(config, "num_attention_heads", 0) or 0),
        width or 0,
        max((tensor_split.num_experts(module) for module in traced.modules), default=0),
        tensor_split.experts_per_token(root),
    )


def _tokens(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() == 2:
            return value.shape[1]
    return 1


Group = tuple[str, nn.Module | None, list[int]]


def _groups(traced: Trace, layers: Sequence[nn.Module]) -> tuple[list[Group], dict[int, int]]:
    """Indices of modules by part: layers, and the others by where they are called first.

    Returns:
        also the part of each module.
    """
    index_of = {module: idx for idx, module in enumerate(traced.modules)}
    names = {module: name for name, module in traced.modules[0].named_modules()}
    layer_of = {index_of[below]: layer for layer in layers for below in layer.modules()}
    groups: list[Group] = []
    owners: dict[int, int] = {}
    place: dict[nn.Module | None, int] = {}
    last = traced.order[-1] if traced.order else 0
    above = {idx for idx in traced.order if _is_above_layers(traced.modules[idx], layers)}
    for idx in traced.order:
        if idx in above:
            continue
        layer = layer_of.get(idx)
        if layer is not None and layer in place:
            position = place[layer]
        elif layer is not None or not groups or groups[-1][1] is not None:
            position = len(groups)
            groups.append((names[layer or traced.modules[idx]] or "(root)", layer, []))
            if layer is not None:
                place[layer] = position
        else:
            position = len(groups) - 1
        groups[position][2].append(idx)
        owners[idx] = position
    if not groups:
        groups.append((names[traced.modules[last]] or "(root)", None, []))
    # The code around layers makes the loss, at the end; what is never called goes there as well, if
    # it is not in a layer, whose code reads its parameters.
    for idx in range(len(traced.modules)):
        if idx not in owners:
            owners[idx] = place.get(layer_of.get(idx), len(groups) - 1)
            groups[owners[idx]][2].append(idx)
    return groups, owners


def _is_above_layers(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    below = set(module.modules()) - {module}
    return any(layer in below for layer in layers)


def _shares(traced: Trace, first: Sequence[int], last: Sequence[int]) -> bool:
    """Does the last part read a parameter of the first one?"""
    early = {p for idx in first for p in traced.modules[idx].parameters(recurse=False)}
    return any(p in early for idx in last for p in traced.modules[idx].parameters(recurse=False))


def _part(
    traced: Trace,
    idxs: Sequence[int],
    width: int | None,
    name: str,
    top: nn.Module | None,
    inputs: Mapping[nn.Module, int],
    owners: Mapping[int, int],
    routed: int,
) -> Part:
    """A part; `top` is the layer that it is, if it is one."""
    totals = {
        key: 0.0
        for key in ("forward", "backward", "kept", "elements")
        for key in (f"split_{key}", f"whole_{key}")
    }
    earlier = {
        p
        for idx, owner in owners.items()
        if idxs and owner < owners[idxs[0]]
        for p in traced.modules[idx].parameters(recurse=False)
    }
    tensors: list[tuple[int, bool]] = []
    before = set(earlier)
    routed_kept = 0.0
    tied: set[nn.Parameter] = set()
    for idx in idxs:
        module, cost = traced.modules[idx], traced.costs[idx]
        kind = "split" if tensor_split.has_split_work(module, width) else "whole"
        # A product is divided whatever comes into it.
        work = "split" if tensor_split.has_split_parameters(module) else kind
        totals[f"{work}_forward"] += cost.forward_flops
        totals[f"{work}_backward"] += tensor_split.backward_work(
            module, cost.forward_flops, cost.backward_flops
        )
        border = max(inputs.values(), default=0)
        kept = tensor_split.kept_parts(module, cost.activation_bytes, width, border, routed)
        totals["split_kept"] += kept[0]
        totals["whole_kept"] += kept[1]
        routed_kept += kept[1] if tensor_split.num_experts(module) else 0.0
        has_split = tensor_split.has_split_parameters(module)
        for parameter in module.parameters(recurse=False):
            if parameter in earlier:
                tied |= {parameter} & before
                continue
            earlier.add(parameter)
            numel = math.prod(parameter.shape)
            totals[f"{'split' if has_split else 'whole'}_elements"] += numel
            tensors.append((numel, has_split))
    largest = max((v.num_bytes for v in traced.values if v.producer in set(idxs)), default=0)
    return Part(
        name=name,
        is_layer=top is not None,
        split_elements=int(totals["split_elements"]),
        whole_elements=int(totals["whole_elements"]),
        tensors=tuple(tensors),
        split_forward=totals["split_forward"],
        whole_forward=totals["whole_forward"],
        split_backward=totals["split_backward"],
        whole_backward=totals["whole_backward"],
        split_kept=totals["split_kept"],
        whole_kept=totals["whole_kept"],
        input_bytes=float(inputs[top]) if top is not None else 0.0,
        largest_bytes=float(largest),
        tied_elements=sum(parameter.numel() for parameter in tied),
        num_products=_num_products(top) if top is not None else 0,
        num_mixtures=0 if top is None else sum(map(_has_experts, top.children())),
        routed_kept=routed_kept,
    )


def _num_products(layer: nn.Module) -> int:
    """Pairs of columns and rows of a layer: one in each of its children, or two products of it."""
    own = 0
    inside = 0
    for child in layer.children():
        if tensor_split.input_width(child) is not None:
            own += 1
        else:
            products = any(tensor_split.input_width(m) is not None for m in child.modules())
            inside += products or _has_experts(child)
    return inside + own // 2


def _has_experts(module: nn.Module) -> bool:
    return any(tensor_split.num_experts(part) for part in module.modules())
