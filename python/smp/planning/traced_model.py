"""A trace of a model as a chain of parts, whole or cut into stages."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.modules import packed
from smp.modules.training_dtypes import plan_dtypes
from smp.partition.costs import Trace
from smp.partition.trace import trace
from smp.planning import tensor_split
from smp.planning.profile import Amount, ModelProfile, Part, Weight
from smp.precision.operands import OperandCasts


@contextlib.contextmanager
def computing_in(root: nn.Module, half: torch.dtype | None) -> Iterator[None]:
    """Casts the parameters and buffers of a model as a run does, and operands inside the block.

    Args:
        root: the model, on the meta device.
        half: dtype of 16 bits, or None: the model stays as it is.
    """
    if half is None:
        yield
        return
    plan_dtypes(root, half).cast(root)
    casts = OperandCasts(root)
    casts.begin()
    try:
        yield
    finally:
        casts.close()


def repeated_layers(root: nn.Module) -> list[nn.Module]:
    """Returns the elements of lists of modules that are not inside another such element."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(module.children())
        if len(children) < 2 or len({type(child) for child in children}) != 1:
            continue
        if not all(any(True for _ in child.parameters()) for child in children):
            continue
        found += children
        inside.update(below for child in children for below in child.modules())
    return found


def layers_again(root: nn.Module, kept: Collection[str]) -> dict[str, nn.Module]:
    """Returns the repeated layers by name, without those whose activations are kept."""
    names = {module: name for name, module in root.named_modules()}
    named = {names[layer]: layer for layer in repeated_layers(root)}
    return {name: layer for name, layer in named.items() if name not in kept}


def _layer_inputs(traced: Trace, layers: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Returns the bytes of the tensors with gradients that come into each layer."""
    index_of = {module: idx for idx, module in enumerate(traced.modules)}
    inputs = {}
    for layer in layers:
        inside = {index_of[below] for below in layer.modules()}
        inputs[layer] = sum(
            value.num_bytes
            for value in traced.values
            if value.needs_grad and value.producer not in inside and inside & set(value.consumers)
        )
    return inputs


class _Group(NamedTuple):
    """A part of the chain: its name, its layer if it is one, and the indices of its modules."""

    name: str
    layer: nn.Module | None
    idxs: list[int]


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
        self._names = {module: name or "(root)" for name, module in root.named_modules()}
        self._groups = _groups(self.costs, layers, self._names)
        self._inputs = _layer_inputs(self.costs, layers)
        self._border = max(self._inputs.values(), default=0)
        self._width = tensor_split.hidden_width(root)
        self._routed = tensor_split.experts_per_token(root)
        self._largest = [0] * len(self.costs.modules)
        for value in self.costs.values:
            most = max(self._largest[value.producer], value.num_bytes)
            self._largest[value.producer] = most

    def profile(self) -> ModelProfile:
        """Returns the chain with a part for each layer."""
        parts = list(self._parts([0] * len(self.costs.modules)).values())
        tail = parts.pop() if self._has_tail else None
        config = getattr(self.root, "config", None)
        return ModelProfile(
            tuple(parts),
            tail,
            _tokens(*self.call),
            int(getattr(config, "num_attention_heads", 0) or 0),
            max((tensor_split.num_experts(module) for module in self.costs.modules), default=0),
            self._routed,
            int(getattr(config, "num_key_value_heads", 0) or 0),
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
        place = self._places(stage_of, num_stages)
        stages: list[list[Part]] = [[] for _ in range(num_stages + self._has_tail)]
        for (stage, _), part in self._parts(place).items():
            stages[stage].append(part)
        incoming, called = [0.0] * len(stages), [0.0] * len(stages)
        for value in self.costs.values:
            if value.needs_grad:
                first = place[value.producer]
                end = max((place[idx] for idx in value.consumers), default=first)
                for stage in range(first + 1, end + 1):
                    incoming[stage] += value.num_bytes
        for caller, idx in self.costs.calls:
            has_state = any(True for _ in self.costs.modules[idx].parameters())
            if has_state and stage_of[caller] % num_ranks != stage_of[idx] % num_ranks:
                called[place[idx]] += self.costs.costs[idx].num_calls
        return list(zip(stages, incoming, called, strict=True))

    def _places(self, stage_of: Sequence[int], num_stages: int) -> list[int]:
        """Returns the stage in which each module runs; `num_stages` is the tail."""
        place = list(stage_of)
        furthest = 0
        for group in self._groups:
            for idx in group.idxs:
                # Modules without parameters run where their data are.
                if not self._own(idx):
                    place[idx] = max(furthest, place[idx])
                furthest = max(furthest, place[idx])
        if len(self._groups) == 1:
            return place
        # Code around layers computes the loss on the rank of the last module with parameters.
        last = self._groups[-1].idxs
        holders = [idx for idx in last if self._own(idx)]
        for idx in last:
            if holders and not self._own(idx):
                place[idx] = place[holders[-1]]
            if self._has_tail and place[idx] == 0:
                place[idx] = num_stages
        return place

    @cached_property
    def _has_tail(self) -> bool:
        """Returns whether the last part reads a parameter of the first one."""
        early = {p for idx in self._groups[0].idxs for p in self._own(idx)}
        late = {p for idx in self._groups[-1].idxs for p in self._own(idx)}
        return len(self._groups) > 1 and not early.isdisjoint(late)

    def _own(self, idx: int) -> list[nn.Parameter]:
        return list(self.costs.modules[idx].parameters(recurse=False))

    def _parts(self, stage_of: Sequence[int]) -> dict[tuple[int, int], Part]:
        """Groups modules by stage and group, in the order of the chain."""
        first_place: dict[nn.Parameter, tuple[int, int]] = {}
        members: dict[tuple[int, int], list[int]] = {}
        for number, group in enumerate(self._groups):
            for idx in group.idxs:
                place = (stage_of[idx], number)
                members.setdefault(place, []).append(idx)
                for parameter in self._own(idx):
                    first_place[parameter] = min(first_place.get(parameter, place), place)
        return {place: self._part(place, members[place], first_place) for place in sorted(members)}

    def _part(
        self,
        place: tuple[int, int],
        idxs: Sequence[int],
        first_place: Mapping[nn.Parameter, tuple[int, int]],
    ) -> Part:
        name, layer, whole = self._groups[place[1]]
        modules = [self.costs.modules[idx] for idx in idxs]
        holders: dict[nn.Parameter, nn.Module] = {}
        for module in modules:
            for parameter in module.parameters(recurse=False):
                holders.setdefault(parameter, module)
        weights, tied = [], 0
        for parameter, module in holders.items():
            if first_place[parameter] < place:
                tied += parameter.numel()
                continue
            if packed.is_packed(parameter):
                num_bytes = packed.num_bytes(parameter)
                weights.append(Weight(0, False, is_trained=False, packed_bytes=num_bytes))
                continue
            is_split = tensor_split.has_split_parameters(module)
            is_wide = parameter.dtype == torch.float32
            weights.append(Weight(parameter.numel(), is_split, is_wide, parameter.requires_grad))
        products = (0, 0) if layer is None else _num_products(layer, set(modules))
        costs = self.costs.costs
        kept = [self.kept(idx, costs[idx].activation_bytes) for idx in idxs]
        return Part(
            name=name if len(idxs) == len(whole) else self._names[modules[0]],
            is_layer=layer is not None,
            weights=tuple(weights),
            forward=reduce(add, (self._work(idx, costs[idx].forward_flops) for idx in idxs)),
            backward=reduce(add, (self._work(idx, costs[idx].backward_flops) for idx in idxs)),
            kept=reduce(add, kept),
            input_bytes=float(self._inputs[layer]) if layer is not None else 0.0,
            largest_bytes=float(max(self._largest[idx] for idx in idxs)),
            tied_elements=tied,
            num_products=products[0],
            num_mixtures=products[1],
            routed_kept=sum(
                own.whole
                for own, module in zip(kept, modules, strict=True)
                if tensor_split.num_experts(module)
            ),
        )

    def kept(self, idx: int, num_bytes: float, spreads_experts: bool = False) -> Amount:
        """Returns the bytes of activations of a module, if its own code keeps `num_bytes`."""
        routed = 0 if spreads_experts else self._routed
        module = self.costs.modules[idx]
        return tensor_split.kept_bytes(module, num_bytes, self._width, self._border, routed)

    def _work(self, idx: int, flops: float) -> Amount:
        module = self.costs.modules[idx]
        # A product is divided, whatever its input is.
        is_split = tensor_split.has_split_parameters(module)
        if is_split or tensor_split.has_split_work(module, self._width):
            return Amount(split=flops)
        return Amount(whole=flops)


def _tokens(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() == 2:
            return value.shape[1]
    return 1


def _groups(
    traced: Trace, layers: Sequence[nn.Module], names: Mapping[nn.Module, str]
) -> list[_Group]:
    """Groups modules by layer, and others by where they are first called."""
    index_of = {module: idx for idx, module in enumerate(traced.modules)}
    layer_of = {index_of[below]: layer for layer in layers for below in layer.modules()}
    tops = set(layers)
    above = {
        idx
        for idx, module in enumerate(traced.modules)
        if any(below in tops for below in module.modules() if below is not module)
    }
    groups: list[_Group] = []
    group_of: dict[nn.Module | None, _Group] = {}
    for idx in traced.order:
        if idx in above:
            continue
        layer = layer_of.get(idx)
        begins = not groups or groups[-1].layer is not None
        if layer not in group_of if layer is not None else begins:
            groups.append(_Group(names[layer or traced.modules[idx]], layer, []))
            group_of[layer] = groups[-1]
        group_of[layer].idxs.append(idx)
    if not groups:
        last = traced.order[-1] if traced.order else 0
        groups.append(_Group(names[traced.modules[last]], None, []))
    # The code around layers computes the loss, at the end. A module that is never called belongs to
    # the layer whose code reads its parameters, or else to the end as well.
    called = {idx for group in groups for idx in group.idxs}
    group_of[None] = groups[-1]
    for idx in range(len(traced.modules)):
        if idx not in called:
            group_of.get(layer_of.get(idx), groups[-1]).idxs.append(idx)
    return groups


def _num_products(layer: nn.Module, inside: Collection[nn.Module]) -> tuple[int, int]:
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
        is_mixture = any(tensor_split.num_experts(part) for part in child.modules())
        mixtures += is_mixture
        if tensor_split.input_width(child) is not None:
            own += 1
        else:
            products = any(tensor_split.input_width(m) is not None for m in child.modules())
            pairs += products or is_mixture
    return pairs + own // 2, mixtures
