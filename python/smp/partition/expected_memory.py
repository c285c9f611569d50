"""Expected memory of each pipeline rank by the partition of a model, known to all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import smp._C as _C
from smp.partition.decide import kept_microbatches
from smp.partition.decision import Decision
from smp.world import comm
from smp.world.rank import Rank


@dataclass(frozen=True)
class Expected:
    """Expected bytes of one pipeline rank for one model.

    Attributes:
        parameters: bytes of the parameters of the rank.
        activations: bytes that one microbatch keeps.
        in_flight: number of microbatches whose activations the rank keeps.
        peak: bytes of parameters, gradients, optimizer state and activations.
    """

    parameters: float
    activations: float
    in_flight: int
    peak: float


def expect(rank: Rank, decision: Decision, is_traced: bool) -> Expected | None:
    """Returns what this rank is expected to need. Collective with several pipeline ranks.

    Args:
        rank: rank of this process.
        decision: partition of the model.
        is_traced: the first rank has a trace of the model; other ranks ignore this.

    Returns:
        The expectation, or None without several pipeline ranks or without a trace.
    """
    pp_size = rank.sizes["pp"]
    if pp_size == 1:
        return None
    by_rank = None
    if rank.global_rank == 0 and is_traced and decision.options is not None:
        in_flight = kept_microbatches(rank.config, pp_size, decision.num_chunks)
        by_rank = [_expect_rank(decision, r, in_flight[r]) for r in range(pp_size)]
    decided = comm.allgather(by_rank, comm.WORLD)[0]
    return None if decided is None else decided[rank.ranks["pp"]]


def _expect_rank(decision: Decision, pp_rank: int, in_flight: int) -> Expected:
    assert decision.options is not None
    evaluation = _C.evaluate_partition(decision.index.tree, decision.assignment, decision.options)
    stages = range(pp_rank, len(evaluation.loads), decision.num_partitions)
    return Expected(
        parameters=sum(evaluation.param_bytes[s] for s in stages),
        activations=sum(evaluation.activation_bytes[s] for s in stages),
        in_flight=in_flight,
        peak=evaluation.memory_bytes[pp_rank],
    )
