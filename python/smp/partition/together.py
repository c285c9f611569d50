"""One decision for all ranks: the first one traces and decides, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from smp import _C, comm, runtime
from smp.partition.costs import Trace
from smp.partition.decide import Decision, PartitionConfig, agree, decide
from smp.partition.tree import ModuleIndex, build_tree


def decide_together(
    root: nn.Module,
    config: PartitionConfig,
    pp_size: int,
    make_trace: Callable[[], Trace | None] | None = None,
) -> Decision:
    """The partition, equal on all ranks. Collective over all ranks.

    Args:
        root: the user's model.
        config, pp_size: as for `decide`.
        make_trace: traces the model; called on the first rank only, whose decision counts. None
            where nothing can be measured or nothing depends on it: all ranks decide then.

    Raises:
        ValueError: on every rank, when the first one cannot decide or ranks have different models.
    """
    current = runtime.current()
    if make_trace is None or current.world_size == 1:
        index = build_tree(root, None if make_trace is None else make_trace())
        decision = decide(root, config, pp_size, index=index)
    elif current.global_rank == 0:
        decision = _decide_for_all(root, config, pp_size, make_trace)
    else:
        given = comm.allgather(None, comm.WORLD)[0]
        if isinstance(given, str):
            raise ValueError(_C.rank_prefix() + given)
        decision = _follow(build_tree(root), pp_size, *given)
    agree(decision)
    return decision


def _decide_for_all(
    root: nn.Module,
    config: PartitionConfig,
    pp_size: int,
    make_trace: Callable[[], Trace | None],
) -> Decision:
    # What the step function raises before it calls the model is nobody else's: the others hear of
    # it as of any failure of a rank. A refusal is everybody's.
    trace = make_trace()
    try:
        decision = decide(root, config, pp_size, index=build_tree(root, trace))
    except ValueError as error:
        comm.allgather(str(error).removeprefix(_C.rank_prefix()), comm.WORLD)
        raise
    comm.allgather((decision.partition_idxs, decision.num_chunks, decision.chunk_idxs), comm.WORLD)
    return decision


def _follow(
    index: ModuleIndex,
    pp_size: int,
    partition_idxs: Sequence[int],
    num_chunks: int,
    chunk_idxs: Sequence[int],
) -> Decision:
    """The first rank's decision for this rank's modules, which `agree` compares afterwards."""
    num_nodes = len(index.modules)
    # Another number of modules has to reach the comparison, whose error says what differs.
    if len(partition_idxs) != num_nodes:
        partition_idxs, num_chunks, chunk_idxs = [0] * num_nodes, 1, []
    return Decision.of(
        index,
        _C.make_assignment(index.tree, pp_size, partition_idxs, num_chunks, chunk_idxs),
    )
