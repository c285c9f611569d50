"""Memory of each rank for a given configuration: the partition of a run, without the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp.config.schema import Config, check_world
from smp.partition.costs import Trace
from smp.partition.decide import partition_options
from smp.partition.decision import Decision
from smp.partition.trace import trace
from smp.partition.tree import build_tree
from smp.planning import tensor_split
from smp.planning.decided import Run, decided, scaled, sharding_of
from smp.planning.half import computing_in
from smp.planning.memory import Holding, Passing, RankBytes, Sharding, rank_bytes
from smp.planning.recomputed import Layer, layers_of, repeated_layers, with_checkpoints
from smp.planning.tensor_split import Shares

_MOST_LEAVING = 2  # copies to the host under way, see docs/design/memory.md


@dataclass(frozen=True)
class StageEstimate:
    """What each rank of a partition has.

    Attributes:
        pp_rank: of the partition.
        num_ranks: so many ranks are alike.
        elements: of parameters that a rank computes with.
        kept_microbatches: whose activations it has at most.
        microbatch_bytes: activations of one of them, on the device.
        held: bytes by kind.
    """

    pp_rank: int
    num_ranks: int
    elements: int
    kept_microbatches: int
    microbatch_bytes: float
    held: RankBytes


@dataclass(frozen=True)
class Estimate:
    """Of a model under a configuration.

    Attributes:
        elements: of the whole model, shared parameters once.
        stages: by pipeline rank.
        decision: where modules are.
        costs: of modules, by which that was decided.
    """

    elements: int
    stages: tuple[StageEstimate, ...]
    decision: Decision
    costs: Trace


def estimate(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], run: Run) -> Estimate:
    """Memory of all ranks.

    Args:
        root: on the meta device; gets the dtypes that the configuration gives it in training.
        args, kwargs: of one microbatch as one rank reads it; small real tensors.
        run: the configuration, and what stands beside it.

    Raises:
        ValueError: the configuration does not fit the number of ranks or the model.
        TraceError: the forward raised.
    """
    config = run.config
    check_world(config, run.num_ranks)
    shares = Shares.of(config)
    spreads = config.expert_parallel_degree > 1
    with computing_in(root, config.half_dtype):
        whole = trace(root, args, kwargs, device=torch.device("cpu"))
    traced = scaled(whole, root, shares, spreads)
    layers = layers_of(traced, repeated_layers(root)) if run.checkpoints else []
    costs = with_checkpoints(traced, layers) if layers else traced
    decision = decided(root, traced, run, [layer.module for layer in layers])
    return Estimate(
        sum(p.numel() for p in root.parameters()),
        tuple(
            _stage(decision, costs, layers, shares, run, pp_rank)
            for pp_rank in range(config.pipeline_parallel_degree)
        ),
        decision,
        traced,
    )


def _stage(
    decision: Decision,
    costs: Trace,
    layers: Sequence[Layer],
    shares: Shares,
    run: Run,
    pp_rank: int,
) -> StageEstimate:
    config = run.config
    pp_size, chunks = decision.num_partitions, decision.num_chunks
    options = partition_options(config, pp_size, chunks)
    tree = build_tree(decision.modules[0], costs).tree
    evaluation = _C.evaluate_partition(tree, decision.assignment, options)
    stages = range(pp_rank, pp_size * chunks, pp_size)
    state = options.state_factor * sum(evaluation.param_bytes[s] for s in stages)
    kept = max(0.0, evaluation.memory_bytes[pp_rank] - state)
    per_microbatch = sum(evaluation.activation_bytes[s] for s in stages)
    sharding = sharding_of(config, run.num_ranks, run.device)
    holding = _parameters(decision, shares, sharding, pp_rank)
    own = [layer for layer in layers if decision.partition_of[layer.module] == pp_rank]
    width = sharding.parameter_bytes
    passing = Passing(
        _largest_tensor(decision, costs, pp_rank),
        width * holding.largest,
        width * _tied_elements(decision, shares, pp_rank),
        max((layer.kept_bytes for layer in own), default=0),
    )
    held = replace(
        holding,
        activations=kept,
        temporary=passing.forward_ends(options.kept_microbatches[pp_rank]),
        late=passing.backward_ends,
    )
    if config.offload_activations and own:
        held = _offloaded(held, own, kept, config)
    return StageEstimate(
        pp_rank=pp_rank,
        num_ranks=run.num_ranks // pp_size,
        elements=int(holding.elements),
        kept_microbatches=options.kept_microbatches[pp_rank],
        microbatch_bytes=per_microbatch,
        held=rank_bytes(held, sharding, config.microbatches),
    )


def _parameters(decision: Decision, shares: Shares, sharding: Sharding, pp_rank: int) -> Holding:
    """Numbers of elements of the parameters of a partition."""
    seen: set[nn.Parameter] = set()
    elements = trainable = small = largest = wide = 0.0
    by_unit: dict[nn.Module, float] = {}
    unit_of: dict[nn.Module, nn.Module] = {}
    for layer in repeated_layers(decision.modules[0]):
        unit_of.update(dict.fromkeys(layer.modules(), layer))
    for module, partition in zip(decision.modules, decision.partition_idxs, strict=True):
        for parameter in module.parameters(recurse=False):
            if partition != pp_rank or parameter in seen:
                seen.add(parameter)
                continue
            seen.add(parameter)
            is_split = tensor_split.has_split_parameters(module)
            numel = parameter.numel() * (shares.split_state if is_split else 1.0)
            elements += numel
            trainable += numel if parameter.requires_grad else 0
            wide += numel if parameter.dtype == torch.float32 else 0
            largest = max(largest, numel)
            if numel < sharding.persistent:
                small += numel
            else:
                unit = unit_of.get(module, module)
                by_unit[unit] = by_unit.get(unit, 0) + numel
    units = sum(sorted(by_unit.values(), reverse=True)[:2])
    return Holding(elements, trainable, small, largest, units, wide)


def _largest_tensor(decision: Decision, costs: Trace, pp_rank: int) -> float:
    """That a rank makes."""
    return max(
        (
            value.num_bytes
            for value in costs.values
            if decision.partition_of[costs.modules[value.producer]] == pp_rank
        ),
        default=0,
    )


def _tied_elements(decision: Decision, shares: Shares, pp_rank: int) -> float:
    """Of parameters that several modules of a rank use."""
    shared = {(tie.owner_idx, tie.owner_name) for tie in decision.index.shared}
    total = 0.0
    for idx, name in shared:
        module = decision.modules[idx]
        if decision.partition_idxs[idx] == pp_rank:
            is_split = tensor_split.has_split_parameters(module)
            numel = module._parameters[name].numel()  # type: ignore[union-attr]
            total += numel * (shares.split_state if is_split else 1.0)
    return total


def _offloaded(held: Holding, own: Sequence[Layer], kept: float, config: Config) -> Holding:
    """Inputs of checkpoints are in host memory, but for those on their way and needed soon."""
    largest = max(layer.input_bytes for layer in own)
    near = (config.activation_loading_horizon + _MOST_LEAVING) * largest
    on_device = min(kept, near)
    return replace(held, activations=on_device, host=kept - on_device)
