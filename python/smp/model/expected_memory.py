"""What the partition of a model expects each pipeline rank to need, told to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

import smp._C as _C
from smp.partition.costs import Trace
from smp.partition.decide import kept_microbatches
from smp.partition.decision import Decision
from smp.partition.expected import Expected
from smp.storage.units import find_blocks
from smp.world import comm
from smp.world.rank import Rank


def expect(
    rank: Rank,
    root: nn.Module,
    decision: Decision,
    trace: Trace | None,
    kept: Sequence[int] | None,
) -> Expected:
    """Of this rank. Collective over all ranks where there are several pipeline ranks.

    Args:
        rank: of this process.
        root: the user's model.
        decision: that was made of it.
        trace: on the first rank, if there is one.
        kept: microbatches that the schedule keeps on each pipeline rank; None: as its policy says.
    """
    blocks = tuple(
        sum(p.numel() * p.element_size() for p in block.parameters())
        for block, _ in find_blocks(root)
    )
    pp_size = rank.sizes["pp"]
    if pp_size == 1:
        return Expected(block_bytes=blocks)
    own = None
    if rank.global_rank == 0 and trace is not None and decision.options is not None:
        in_flight = kept or kept_microbatches(rank.config, pp_size, decision.num_chunks)
        own = [_of_rank(decision, trace, r, in_flight[r]) for r in range(pp_size)]
    told = comm.allgather(own, comm.WORLD)[0]
    expected = Expected() if told is None else told[rank.ranks["pp"]]
    return replace(expected, block_bytes=blocks)


def _of_rank(decision: Decision, trace: Trace, pp_rank: int, in_flight: int) -> Expected:
    assert decision.options is not None
    evaluation = _C.evaluate_partition(decision.index.tree, decision.assignment, decision.options)
    stages = range(pp_rank, len(evaluation.loads), decision.num_partitions)
    activations = sum(evaluation.activation_bytes[s] for s in stages)
    return Expected(
        parameters=sum(evaluation.param_bytes[s] for s in stages),
        activations=activations,
        in_flight=in_flight,
        peak=evaluation.memory_bytes[pp_rank],
        checkpointed=_checkpointed(decision, trace, pp_rank, activations, in_flight),
    )


def _checkpointed(
    decision: Decision, trace: Trace, pp_rank: int, activations: float, in_flight: int
) -> float:
    """With each block checkpointed: what lies outside of them, their results, and one block."""
    cost_of = dict(zip(trace.modules, trace.costs, strict=True))
    owner = dict(zip(decision.index.modules, decision.partition_idxs, strict=True))
    kept = activations
    largest = 0.0
    for block, _ in find_blocks(decision.index.modules[0]):
        if owner.get(block) != pp_rank or block not in cost_of:
            continue
        inside = sum(cost_of[m].activation_bytes for m in block.modules() if m in cost_of)
        kept += cost_of[block].output_bytes - inside
        largest = max(largest, inside)
    return max(0.0, kept) * in_flight + largest
