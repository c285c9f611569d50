"""A trace of a model as a chain of parts, whole or cut into stages."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from smp.partition.costs import Trace
from smp.partition.trace import trace
from smp.planning import tensor_split
from smp.planning.profile import ModelProfile, Part
from smp.planning.recomputed import layers_of, repeated_layers


class TracedModel:
    """A model that was traced with one sample, as a chain of parts; parameters take no memory.

    Attributes:
        root: the model.
        costs: costs of its modules, on the hardware of the plan.
    """

    def __init__(
        self,
        root: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        flops_per_byte: float | None = None,
    ) -> None:
        """Traces the model.

        Args:
            root: model on the meta device, in the dtype that it computes in.
            args, kwargs: arguments of a forward with one sample.
            flops_per_byte: rate of the device, or None for the usual rate of its type.

        Raises:
            TraceError: the forward raised.
        """
        self.root, self.call = root, (tuple(args), dict(kwargs))
        cpu = torch.device("cpu")
        self.costs = trace(root, args, kwargs, device=cpu, flops_per_byte=flops_per_byte)
        layers = repeated_layers(root)
        self._names = {module: name for name, module in root.named_modules()}
        self._groups, self._owners = _groups(self.costs, layers)
        self._inputs = {layer.module: layer.input_bytes for layer in layers_of(self.costs, layers)}
        self._works = _works(self.costs, root, max(self._inputs.values(), default=0))

    def profile(self) -> ModelProfile:
        """Returns the chain with a part for each layer."""
        parts = list(self._parts({idx: (owner,) for idx, owner in self._owners.items()}).values())
        tail = parts.pop() if self._has_tail else None
        config = getattr(self.root, "config", None)
        return ModelProfile(
            tuple(parts),
            tail,
            _tokens(*self.call),
            int(getattr(config, "num_attention_heads", 0) or 0),
            tensor_split.hidden_width(self.root) or 0,
            max((tensor_split.num_experts(module) for module in self.costs.modules), default=0),
            tensor_split.experts_per_token(self.root),
        )

    def cut(
        self, stage_of: Sequence[int], num_stages: int, num_ranks: int
    ) -> list[tuple[list[Part], float, float]]:
        """Returns the parts of stages that may begin inside layers.

        Args:
            stage_of: stage of each module of `costs`.
            num_stages: stages of all ranks, without a tail.
            num_ranks: pipeline ranks.

        Returns:
            For each stage, and for a tail if there is one: the parts, bytes of one sample that
            come from the stages before, and calls of its modules by code of other ranks.
        """
        place = dict(enumerate(stage_of))
        last = self._groups[-1][2] if len(self._groups) > 1 else []
        furthest = 0
        for _, _, idxs in self._groups:
            for idx in idxs:
                # Modules without parameters run where their data are.
                if not self._has_own(idx):
                    place[idx] = max(furthest, place[idx])
                furthest = max(furthest, place[idx])
        # Code around layers computes the loss on the rank of the last module with parameters.
        holders = [idx for idx in last if self._has_own(idx)]
        for idx in last:
            if not self._has_own(idx) and holders:
                place[idx] = place[holders[-1]]
        if self._has_tail:
            place |= {idx: num_stages for idx in last if place[idx] == 0}
        parts = self._parts({idx: (place[idx], owner) for idx, owner in self._owners.items()})
        stages: list[list[Part]] = [[] for _ in range(num_stages + self._has_tail)]
        for (stage, _), part in parts.items():
            stages[stage].append(part)
        incoming = [0.0] * len(stages)
        for value in self.costs.values:
            if value.needs_grad:
                first = place[value.producer]
                end = max((place[idx] for idx in value.consumers), default=first)
                for stage in range(first + 1, end + 1):
                    incoming[stage] += value.num_bytes
        called = [0.0] * len(stages)
        for caller, idx in self.costs.calls:
            if stage_of[caller] % num_ranks != stage_of[idx] % num_ranks and self._has_state(idx):
                called[place[idx]] += self.costs.costs[idx].num_calls
        return list(zip(stages, incoming, called, strict=True))

    @cached_property
    def _has_tail(self) -> bool:
        groups = self._groups
        return len(groups) > 1 and _shares(self.costs, groups[0][2], groups[-1][2])

    def _has_state(self, idx: int) -> bool:
        return any(True for _ in self.costs.modules[idx].parameters())

    def _has_own(self, idx: int) -> bool:
        return any(True for _ in self.costs.modules[idx].parameters(recurse=False))

    def _parts(self, place_of: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, ...], Part]:
        """Groups modules by their place in the chain, in order."""
        first_place: dict[nn.Parameter, tuple[int, ...]] = {}
        members: dict[tuple[int, ...], list[int]] = {}
        for _, _, idxs in self._groups:
            for idx in idxs:
                place = place_of[idx]
                members.setdefault(place, []).append(idx)
                for parameter in self.costs.modules[idx].parameters(recurse=False):
                    first_place[parameter] = min(first_place.get(parameter, place), place)
        return {place: self._part(place, members[place], first_place) for place in sorted(members)}

    def _part(
        self,
        place: tuple[int, ...],
        idxs: Sequence[int],
        first_place: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> Part:
        group_name, top, whole_group = self._groups[self._owners[idxs[0]]]
        works = [self._works[idx] for idx in idxs]
        elements = {"split": 0, "whole": 0}
        frozen = {"split": 0, "whole": 0}
        tensors: list[tuple[int, bool, bool]] = []
        seen: set[nn.Parameter] = set()
        tied = 0
        for idx in idxs:
            module = self.costs.modules[idx]
            has_split = tensor_split.has_split_parameters(module)
            for parameter in module.parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                if first_place[parameter] < place:
                    tied += parameter.numel()
                    continue
                kind = "split" if has_split else "whole"
                elements[kind] += parameter.numel()
                if not parameter.requires_grad:
                    frozen[kind] += parameter.numel()
                tensors.append((parameter.numel(), has_split, parameter.dtype == torch.float32))
        inside = {self.costs.modules[idx] for idx in idxs}
        is_whole = len(idxs) == len(whole_group)
        products = (0, 0) if top is None else _num_products(top, inside)
        return Part(
            name=group_name if is_whole else self._names[self.costs.modules[idxs[0]]] or "(root)",
            is_layer=top is not None,
            split_elements=elements["split"],
            whole_elements=elements["whole"],
            tensors=tuple(tensors),
            split_forward=sum(work.split_forward for work in works),
            whole_forward=sum(work.whole_forward for work in works),
            split_backward=sum(work.split_backward for work in works),
            whole_backward=sum(work.whole_backward for work in works),
            split_kept=sum(work.split_kept for work in works),
            whole_kept=sum(work.whole_kept for work in works),
            input_bytes=float(self._inputs[top]) if top is not None else 0.0,
            largest_bytes=float(max((work.largest_bytes for work in works), default=0)),
            tied_elements=tied,
            frozen_split=frozen["split"],
            frozen_whole=frozen["whole"],
            num_products=products[0],
            num_mixtures=products[1],
            routed_kept=sum(work.routed_kept for work in works),
        )


def profile(
    root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], flops_per_byte: float
) -> ModelProfile:
    """Returns the chain of parts of a model; see `TracedModel`."""
    return TracedModel(root, args, kwargs, flops_per_byte).profile()


def _tokens(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() == 2:
            return value.shape[1]
    return 1


Group = tuple[str, nn.Module | None, list[int]]


def _groups(traced: Trace, layers: Sequence[nn.Module]) -> tuple[list[Group], dict[int, int]]:
    """Groups indices of modules by part: by layer, and otherwise by where they are first called.

    Returns:
        The groups, and the group of each module.
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
    # The code around layers computes the loss, at the end. A module that is never called belongs to
    # the layer whose code reads its parameters, or else to the end as well.
    for idx in range(len(traced.modules)):
        if idx not in owners:
            owners[idx] = place.get(layer_of.get(idx), len(groups) - 1)
            groups[owners[idx]][2].append(idx)
    return groups, owners


def _is_above_layers(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    below = set(module.modules()) - {module}
    return any(layer in below for layer in layers)


def _shares(traced: Trace, first: Sequence[int], last: Sequence[int]) -> bool:
    """Returns whether the last part reads a parameter of the first one."""
    early = {p for idx in first for p in traced.modules[idx].parameters(recurse=False)}
    return any(p in early for idx in last for p in traced.modules[idx].parameters(recurse=False))


@dataclass(frozen=True)
class _Work:
    """Work and activations of one module, as in `Part`."""

    split_forward: float
    whole_forward: float
    split_backward: float
    whole_backward: float
    split_kept: float
    whole_kept: float
    routed_kept: float
    largest_bytes: int


def _works(traced: Trace, root: nn.Module, border_bytes: int) -> list[_Work]:
    """Returns the work of each module; `border_bytes` come into a layer."""
    width = tensor_split.hidden_width(root)
    routed = tensor_split.experts_per_token(root)
    largest = [0] * len(traced.modules)
    for value in traced.values:
        largest[value.producer] = max(largest[value.producer], value.num_bytes)
    works = []
    for module, cost, most in zip(traced.modules, traced.costs, largest, strict=True):
        # A product is divided, whatever its input is.
        is_split = tensor_split.has_split_parameters(module) or tensor_split.has_split_work(
            module, width
        )
        forward, backward = cost.forward_flops, cost.backward_flops
        kept = tensor_split.kept_parts(module, cost.activation_bytes, width, border_bytes, routed)
        works.append(
            _Work(
                forward if is_split else 0.0,
                0.0 if is_split else forward,
                backward if is_split else 0.0,
                0.0 if is_split else backward,
                *kept,
                kept[1] if tensor_split.num_experts(module) else 0.0,
                most,
            )
        )
    return works


def _num_products(layer: nn.Module, inside: Container[nn.Module]) -> tuple[int, int]:
    """Returns the pairs of columns and rows of a layer, and how many of them are mixtures.

    Each child with products is one pair; two products that are children themselves are one, too.

    Args:
        layer: the layer.
        inside: modules of the layer that count.
    """
    own = pairs = mixtures = 0
    for child in layer.children():
        if child not in inside:
            continue
        mixtures += (is_mixture := _has_experts(child))
        if tensor_split.input_width(child) is not None:
            own += 1
        else:
            products = any(tensor_split.input_width(m) is not None for m in child.modules())
            pairs += products or is_mixture
    return pairs + own // 2, mixtures


def _has_experts(module: nn.Module) -> bool:
    return any(tensor_split.num_experts(part) for part in module.modules())
