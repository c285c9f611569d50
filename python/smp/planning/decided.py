"""Decides the partition that a run with a configuration would have, without the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from smp import data_parallel
from smp.config.schema import Config
from smp.partition.costs import Trace
from smp.partition.decide import Fastest, decide
from smp.partition.decision import Decision
from smp.partition.fastest import StepShape
from smp.partition.room import state_factor
from smp.partition.together import without_cuts
from smp.partition.tree import build_tree
from smp.planning import tensor_split
from smp.planning.memory import Sharding
from smp.planning.recomputed import layers_of, repeated_layers
from smp.planning.tensor_split import Shares


@dataclass(frozen=True)
class Run:
    """A run whose partition is decided.

    Attributes:
        config: configuration of the run.
        given: keys of the configuration that were set explicitly.
        num_ranks: number of processes.
        checkpoints: each repeated layer is computed again in backward.
        room_bytes: memory of a device that the partition may take; 0: not known.
        device: type of device, which decides bucket sizes.
    """

    config: Config
    given: frozenset[str] = frozenset()
    num_ranks: int = 1
    checkpoints: bool = False
    room_bytes: int = 0
    device: str = "cpu"


def sharding_of(config: Config, num_ranks: int, device: str = "cpu") -> Sharding:
    """Returns how a configuration keeps state on `num_ranks` ranks."""
    rdp = num_ranks // (config.pipeline_parallel_degree * config.tensor_parallel_degree)
    return Sharding(
        half=config.half_dtype is not None,
        size=config.shard_size(rdp),
        parameters=config.sharded_data_parallel_degree > 1,
        persistent=config.sdp_param_persistence_threshold,
        bucket_bytes=data_parallel.bucket_cap_bytes(data_parallel.DEFAULT_MB, torch.device(device)),
    )


def scaled(traced: Trace, root: nn.Module, shares: Shares, spreads_experts: bool) -> Trace:
    """Returns a trace with the activations that a rank of a tensor-parallel group keeps."""
    if shares == Shares(1.0, 1.0, 1.0):
        return traced
    width = tensor_split.hidden_width(root)
    layers = layers_of(traced, repeated_layers(root))
    border = max((layer.input_bytes for layer in layers), default=0)

    routed = 0 if spreads_experts else tensor_split.experts_per_token(root)

    def kept(module: nn.Module, num_bytes: float) -> int:
        split, whole = tensor_split.kept_parts(module, num_bytes, width, border, routed)
        return int(split * shares.split + whole * shares.whole)

    return replace(
        traced,
        costs=tuple(
            replace(cost, activation_bytes=kept(module, cost.activation_bytes))
            for module, cost in zip(traced.modules, traced.costs, strict=True)
        ),
        values=tuple(
            replace(
                value,
                num_bytes=int(shares.whole * value.num_bytes),
                activation_bytes=kept(traced.modules[value.producer], value.activation_bytes),
            )
            for value in traced.values
        ),
    )


def decided(root: nn.Module, traced: Trace, run: Run, whole: Sequence[nn.Module]) -> Decision:
    """Decides as a run does, which does not count what checkpoints save."""
    config = run.config
    pp_size = config.pipeline_parallel_degree
    sharding = sharding_of(config, run.num_ranks, run.device)
    fastest = None
    if pp_size > 1 and not {"memory_weight", "optimize"} & run.given:
        active = config.active_microbatches or config.microbatches
        fastest = Fastest(
            StepShape(config.pipeline, config.microbatches, active),
            run.room_bytes,
            state_factor(root.parameters(), config, sharding.size),
        )
    decision = decide(
        root,
        config,
        pp_size,
        index=build_tree(root, traced),
        file=config.partition_file,
        num_chunks=config.virtual_stages if pp_size > 1 else 1,
        memory_limit_bytes=config.partition_memory_limit or 0,
        fastest=fastest,
    )
    if decision.decided_by != "auto":
        return decision
    return without_cuts(root, traced, whole, fastest, decision)
