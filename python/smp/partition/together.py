"""Makes one decision for all ranks: the first one traces and decides, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import smp._C as _C
from smp.config.schema import Config
from smp.modules.materialize import cast
from smp.modules.module_writes import ModuleWrites
from smp.partition.contexts import wish_of
from smp.partition.costs import DIFFERENTIATES, OWN_BACKWARD, READS, TRANSFORMS, Trace
from smp.partition.decide import (
    Fastest,
    PartitionConfig,
    WishError,
    add_wishes,
    agree,
    decide,
    partition_options,
    solve,
)
from smp.partition.decision import Decision
from smp.partition.devices import least_by_stage
from smp.partition.fastest import candidate
from smp.partition.tree import ModuleIndex, build_tree
from smp.world import comm
from smp.world.rank import Rank

# Factor by which the largest load of a rank may grow so that no checkpointed module is cut.
_MOST_FOR_WHOLE = 1.25
# Number of modules that an error names.
_MOST_NAMED = 4
# Remedies by how code uses parameters of other modules.
_REMEDIES = {
    READS: "Call a module instead of reading its weight; take averages of weights, penalties and "
    "norms over parameters out of the forward (behind the step, over model.local_parameters(), or "
    "as weight_decay)",
    TRANSFORMS: "Transforms (vmap, grad, jvp, functional_call) do not reach other ranks",
    OWN_BACKWARD: "The backward of such a function (reversible layers) is code of one rank",
    DIFFERENTIATES: "A gradient that has a graph of its own (create_graph=True: forces, penalties "
    "of gradients) does not reach other ranks",
}


@dataclass(frozen=True)
class ModulePlaces:
    """The places of a model's modules, in the order of its tree, without the modules.

    Attributes:
        partition_idxs: pipeline rank per module.
        num_chunks: stages per rank.
        chunk_idxs: chunk per module; empty if there is one chunk only.
        decided_by: see `Decision`.
        writes: see `ModuleIndex`.
    """

    partition_idxs: tuple[int, ...]
    num_chunks: int
    chunk_idxs: tuple[int, ...]
    decided_by: str
    writes: ModuleWrites

    @classmethod
    def of(cls, decision: Decision) -> ModulePlaces:
        """Returns the places that a decision gives to modules."""
        return cls(
            decision.partition_idxs,
            decision.num_chunks,
            decision.chunk_idxs,
            decision.decided_by,
            decision.index.writes,
        )


@dataclass(frozen=True)
class Demands:
    """The demands on a decision besides the configuration's own keys, see `decide`.

    Attributes:
        file: a partition file to follow; only the first rank reads it.
        num_chunks: stages per rank.
        memory_limits: limit of bytes on each pipeline rank; empty for no limits.
        speeds: speed of each pipeline rank's device in any one unit; empty: all are alike.
        room_bytes: memory of this rank; 0: not known.
        whole: modules that should not be cut: each is one checkpoint.
        fastest: input for the search of the shortest step; `decide_together` adds the rooms.
        is_weighed: whether time and memory are weighed as the configuration says, instead of that
            search; the first rank's value counts.
        earlier: an earlier partition that the parameters are laid out by; it is used as it is.
    """

    file: str | Path | None = None
    num_chunks: int = 1
    memory_limits: Sequence[int] = ()
    speeds: Sequence[float] = ()
    room_bytes: int = 0
    whole: Collection[nn.Module] = ()
    fastest: Fastest | None = None
    is_weighed: bool = False
    earlier: ModulePlaces | None = None


def decide_together(
    rank: Rank,
    root: nn.Module,
    make_trace: Callable[[], Trace | None] | None = None,
    demands: Demands | None = None,
) -> Decision:
    """Returns the partition, equal on all ranks. Collective over all ranks.

    Args:
        rank: own rank, with its configuration and the number of pipeline ranks.
        root: the user's model.
        make_trace: function that traces the model; called on the first rank only, whose decision
            counts. None if nothing can be measured or nothing depends on it: each rank then
            decides for itself, unless there is a file.
        demands: further demands.

    Raises:
        ValueError: the first rank cannot decide, or ranks have different models; every rank
            raises it.
    """
    config, pp_size = rank.config, rank.sizes["pp"]
    demands = demands or Demands()
    if demands.earlier is None:
        demands = _with_rooms(rank, demands)
    if demands.earlier is not None:
        decision = _follow(build_tree(root), pp_size, demands.earlier)
    elif rank.world_size == 1 or (make_trace is None and demands.file is None):
        trace = None if make_trace is None else make_trace()
        decision = _decide(root, config, pp_size, trace, demands)
    elif rank.global_rank == 0:
        decision = _decide_for_all(root, config, pp_size, make_trace, demands)
    else:
        given = comm.allgather(None, comm.WORLD)[0]
        if isinstance(given, str):
            raise ValueError(_C.rank_prefix() + given)
        casts, placed = given
        if config.half_dtype is None:
            _cast(root, casts)
        decision = _follow(build_tree(root), pp_size, placed)
    agree(decision, rank.world_size)
    return decision


def _with_rooms(rank: Rank, demands: Demands) -> Demands:
    """Returns demands with the same search and rooms on all ranks. Collective over all ranks.

    Ranks with equal configurations may differ in which keys were given.
    """
    if demands.fastest is None:
        return demands
    own = (demands.is_weighed, demands.room_bytes)
    told = [own] if rank.world_size == 1 else comm.allgather(own, comm.WORLD)
    if told[0][0]:
        return replace(demands, fastest=None)
    rooms = least_by_stage([room for _, room in told], rank.grid)
    known = tuple(rooms) if all(rooms) else ()
    return replace(demands, fastest=replace(demands.fastest, rooms=known))


def _decide(
    root: nn.Module, config: PartitionConfig, pp_size: int, trace: Trace | None, demands: Demands
) -> Decision:
    try:
        decision = decide(
            root,
            config,
            pp_size,
            index=build_tree(root, trace),
            file=demands.file,
            num_chunks=demands.num_chunks,
            memory_limits=demands.memory_limits,
            speeds=demands.speeds,
            fastest=demands.fastest,
        )
    except OSError as error:
        raise ValueError(
            f"{_C.rank_prefix()}partition file {demands.file}: {error.strerror or error}; only the "
            "first rank reads it, check the path there"
        ) from None
    except WishError:
        raise
    except ValueError as error:
        reads = _reads_in_the_way(root, config, pp_size, trace, demands)
        if not reads:
            raise
        raise ValueError(_C.rank_prefix() + reads) from error
    if decision.decided_by == "auto":
        return without_cuts(root, trace, demands.whole, demands.fastest, decision)
    return decision


def _reads_in_the_way(
    root: nn.Module, config: PartitionConfig, pp_size: int, trace: Trace | None, demands: Demands
) -> str:
    """Returns why reads of foreign parameters prevent a split; empty if they are not the cause."""
    if trace is None or not trace.parameter_reads or not config.auto_partition:
        return ""
    options = partition_options(config, pp_size, demands.num_chunks, demands.memory_limits)
    alone = build_tree(root, replace(trace, parameter_reads={}))
    try:
        _add_wishes(alone, pp_size)
        _C.solve_partition(alone.tree, options)
    except ValueError:
        return ""
    names = {module: name or "(root)" for name, module in root.named_modules()}
    read: dict[tuple[int, str], list[str]] = {}
    for (reader, holder), how in sorted(trace.parameter_reads.items()):
        read.setdefault((reader, how), []).append(f"'{names[trace.modules[holder]]}'")
    told = []
    for (reader, how), holders in list(read.items())[:_MOST_NAMED]:
        module = trace.modules[reader]
        more = f" and {len(holders) - _MOST_NAMED} more" if len(holders) > _MOST_NAMED else ""
        told.append(
            f"{names[module]} ({type(module).__name__}) {how} "
            f"{', '.join(holders[:_MOST_NAMED])}{more}"
        )
    remedies = "; ".join(_REMEDIES[how] for how in dict.fromkeys(how for _, how in read))
    return (
        f"partition: the model cannot be split into {pp_size} partitions, because code of modules "
        f"must be on one rank with what it uses: {'; '.join(told)}. {remedies}; otherwise set "
        "pipeline_parallel_degree to 1"
    )


def _add_wishes(index: ModuleIndex, pp_size: int) -> None:
    add_wishes(index, [wish_of(module) for module in index.modules], pp_size)


def _is_cut(decision: Decision, module: nn.Module) -> bool:
    idxs = {decision.partition_of[m] for m in module.modules() if any(True for _ in m.parameters())}
    return len(idxs) > 1


def without_cuts(
    root: nn.Module,
    trace: Trace | None,
    whole: Collection[nn.Module],
    fastest: Fastest | None,
    free: Decision,
) -> Decision:
    """Returns a decision that cuts none of some modules, or the given one if that is unbalanced.

    Args:
        root: the model.
        trace: trace of the model, if there is one.
        whole: modules that should not be cut.
        fastest: input for the search of the shortest step that made the given decision.
        free: decision that was made without this wish.
    """
    if not any(_is_cut(free, module) for module in whole):
        return free
    return _with_whole(root, trace, whole, fastest, free) or free


def _with_whole(
    root: nn.Module,
    trace: Trace | None,
    wanted: Collection[nn.Module],
    fastest: Fastest | None,
    free: Decision,
) -> Decision | None:
    assert free.options is not None
    options = free.options
    index = build_tree(root, trace, wanted)
    try:
        _add_wishes(index, free.num_partitions)
        found = Decision.of(index, solve(index, options), options)
    except ValueError:  # too few modules, too much on one rank, or set to several
        return None
    whole, cut = (_C.evaluate_partition(d.index.tree, d.assignment, options) for d in (found, free))
    if whole.largest_load > _MOST_FOR_WHOLE * cut.largest_load:
        return None
    # If the limits are not strict, partitions above them were found as well.
    if whole.excess_bytes > cut.excess_bytes:
        return None
    if fastest is None:
        return found
    ratio = candidate(index.tree, found.assignment, options, fastest.shape).step_ratio
    return replace(found, step_ratio=ratio)


def _decide_for_all(
    root: nn.Module,
    config: Config,
    pp_size: int,
    make_trace: Callable[[], Trace | None] | None,
    demands: Demands,
) -> Decision:
    # An error of the step function before it calls the model is raised on this rank only; others
    # learn of it as of any failure of a rank. A refused partition is raised on all ranks.
    trace = None if make_trace is None else make_trace()
    casts = () if trace is None else trace.casts
    if config.half_dtype is None:
        _cast(root, casts)
    try:
        decision = _decide(root, config, pp_size, trace, demands)
    except ValueError as error:
        comm.allgather(str(error).removeprefix(_C.rank_prefix()), comm.WORLD)
        raise
    comm.allgather((casts, ModulePlaces.of(decision)), comm.WORLD)
    return decision


def _cast(root: nn.Module, casts: Sequence[tuple[int, str, torch.dtype]]) -> None:
    """Gives parameters the dtype that their model's forward gives them.

    A parameter whose dtype changes inside of a step would lose its gradient accumulation.
    """
    modules = list(root.modules())
    for idx, name, dtype in casts:
        parameter = modules[idx]._parameters.get(name) if idx < len(modules) else None
        if parameter is not None:
            cast(parameter, dtype)


def _follow(index: ModuleIndex, pp_size: int, placed: ModulePlaces) -> Decision:
    """Returns another decision's places for this rank's modules; `agree` compares them later."""
    num_nodes = len(index.modules)
    idxs, num_chunks, chunk_idxs = placed.partition_idxs, placed.num_chunks, placed.chunk_idxs
    # A different number of modules has to reach the comparison, whose error shows the difference.
    if len(idxs) != num_nodes:
        idxs, num_chunks, chunk_idxs = (0,) * num_nodes, 1, ()
    assignment = _C.make_assignment(index.tree, pp_size, idxs, num_chunks, chunk_idxs)
    return Decision.of(
        replace(index, writes=placed.writes), assignment, decided_by=placed.decided_by
    )
