"""Estimates the memory of each rank under a configuration, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from smp.config.schema import check_world
from smp.partition.costs import Trace
from smp.partition.decide import kept_microbatches
from smp.partition.decision import Decision
from smp.planning.decided import Run, decided, scaled, sharding_of
from smp.planning.half import computing_in
from smp.planning.memory import RankBytes, rank_bytes
from smp.planning.recomputed import repeated_layers
from smp.planning.run_cuts import stages_of
from smp.planning.stages import Content, Terms, contents_of, holding_of
from smp.planning.tensor_split import Shares
from smp.planning.traced_model import TracedModel


@dataclass(frozen=True)
class StageEstimate:
    """Estimate of each rank of one pipeline stage.

    Attributes:
        pp_rank: pipeline rank.
        num_ranks: number of ranks that are alike.
        elements: parameter elements that a rank computes with.
        kept_microbatches: largest number of microbatches whose activations are kept.
        microbatch_bytes: bytes of activations of one microbatch, on the device.
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
    """Estimate of a model under a configuration.

    Attributes:
        elements: parameter elements of the whole model, shared ones once.
        stages: estimates by pipeline rank.
        decision: the partition.
        costs: costs of modules, by which the partition was decided.
    """

    elements: int
    stages: tuple[StageEstimate, ...]
    decision: Decision
    costs: Trace


def estimate(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], run: Run) -> Estimate:
    """Returns the memory of all ranks.

    Args:
        root: model on the meta device; gets the dtypes that the configuration gives it in training.
        args, kwargs: arguments of one microbatch as one rank reads it; small real tensors.
        run: the configuration with the number of ranks and other facts of the run.

    Raises:
        ValueError: the configuration does not fit the number of ranks or the model.
        TraceError: the forward raised.
    """
    config = run.config
    check_world(config, run.num_ranks)
    with computing_in(root, config.half_dtype):
        model = TracedModel(root, args, kwargs)
    terms = terms_of(run)
    traced = scaled(model.costs, root, terms.shares, terms.spreads_experts)
    decision = decided(root, traced, run, repeated_layers(root) if run.checkpoints else ())
    size = decision.num_partitions
    contents = contents_of(stages_of(model, decision), size, decision.num_chunks)
    return Estimate(
        sum(p.numel() for p in root.parameters()),
        tuple(_stage(rank, contents, terms, run.num_ranks // size) for rank in range(size)),
        decision,
        traced,
    )


def terms_of(run: Run) -> Terms:
    """Returns the terms of a configuration; a sample is one rank's share of a microbatch."""
    config = run.config
    pp = config.pipeline_parallel_degree
    return Terms(
        Shares.of(config),
        kept_microbatches(config, pp, config.virtual_stages if pp > 1 else 1),
        config.microbatches,
        sharding_of(config, run.num_ranks, run.device),
        checkpoints=run.checkpoints,
        offload=config.offload_activations,
        horizon=config.activation_loading_horizon,
        spreads_experts=config.expert_parallel_degree > 1,
    )


def _stage(
    pp_rank: int, contents: Sequence[Content], terms: Terms, num_ranks: int
) -> StageEstimate:
    (content,) = (one for one in contents if pp_rank in one.ranks)
    kept = terms.kept[pp_rank]
    holding = holding_of(content, terms, kept)
    return StageEstimate(
        pp_rank=pp_rank,
        num_ranks=num_ranks,
        elements=int(holding.elements),
        kept_microbatches=kept,
        microbatch_bytes=holding_of(content, terms, 1).activations,
        held=rank_bytes(holding, terms.sharding, terms.microbatches),
    )
