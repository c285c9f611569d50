"""Estimates the memory of each rank under a configuration, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from smp.config.processes import check_world
from smp.modules import packed
from smp.partition.decision import Decision
from smp.planning.layout import Layout
from smp.planning.memory import RankBytes, activations_of, rank_bytes, weights_of
from smp.planning.run_cuts import Run, decided, scaled, stages_of
from smp.planning.stages import Content, contents_of
from smp.planning.traced_model import TracedModel, computing_in


@dataclass(frozen=True)
class StageEstimate:
    """Estimate of each rank of one pipeline stage, or of the one with the least room to spare.

    Attributes:
        pp_rank: pipeline rank.
        num_ranks: number of ranks that are alike.
        elements: parameter elements that a rank computes with.
        kept_microbatches: largest number of microbatches whose activations are kept.
        microbatch_bytes: bytes of activations of one microbatch, on the device.
        held: bytes by kind.
        room: bytes of the device; None: not known.
    """

    pp_rank: int
    num_ranks: int
    elements: int
    kept_microbatches: int
    microbatch_bytes: float
    held: RankBytes
    room: int | None = None


@dataclass(frozen=True)
class Estimate:
    """Estimate of a model under a configuration.

    Attributes:
        elements: parameter elements of the whole model, shared ones once.
        stages: estimates by pipeline rank.
        decision: the partition.
    """

    elements: int
    stages: tuple[StageEstimate, ...]
    decision: Decision


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
    check_world(run.config, run.num_ranks)
    with computing_in(root, run.config.half_dtype):
        model = TracedModel(root, args, kwargs)
    layout = run.layout
    decision = decided(root, scaled(model, model.costs, layout), run)
    contents = contents_of(stages_of(model, decision), layout.pp, decision.num_chunks)
    content_of = {rank: content for content in contents for rank in content.ranks}
    stages = tuple(_stage(rank, content_of[rank], run) for rank in range(layout.pp))
    return Estimate(sum(map(packed.num_elements, root.parameters())), stages, decision)


def _stage(pp_rank: int, content: Content, run: Run) -> StageEstimate:
    if run.kinds is None:
        return _stage_of(pp_rank, content, run.layout)
    found = []
    for place in run.kinds.places(run.layout)[pp_rank]:
        own = _stage_of(pp_rank, content, replace(run.layout, share=place.share))
        found.append(replace(own, room=run.kinds.devices[place.kind].memory_bytes))
    return max(found, key=lambda own: own.held.peak / (own.room or 1))


def _stage_of(pp_rank: int, content: Content, layout: Layout) -> StageEstimate:
    kept, weights = layout.kept[pp_rank], weights_of(content, layout)
    return StageEstimate(
        pp_rank=pp_rank,
        num_ranks=layout.num_ranks // layout.pp,
        elements=int(weights.elements),
        kept_microbatches=kept,
        microbatch_bytes=activations_of(content, weights, layout, 1).kept,
        held=rank_bytes(weights, activations_of(content, weights, layout, kept), layout),
    )
