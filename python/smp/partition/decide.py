"""Turns a model, the configuration and the user's marks into one decision for all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import nn

import smp._C as _C
from smp.partition import partition_file
from smp.partition.contexts import check_index, mark_of, wish_of
from smp.partition.decision import Decision
from smp.partition.fastest import Candidate, StepShape, candidate, choose
from smp.partition.tree import ModuleIndex, SharedParameter, build_tree, smallest_below
from smp.world import comm
from smp.world.log import first_rank_log


class PartitionConfig(Protocol):
    """The configuration keys that the partition depends on."""

    @property
    def auto_partition(self) -> bool: ...
    @property
    def default_partition(self) -> int: ...
    @property
    def memory_weight(self) -> float | None: ...
    @property
    def pipeline(self) -> str: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def active_microbatches(self) -> int | None: ...


def partition_options(
    config: PartitionConfig,
    pp_size: int,
    num_chunks: int = 1,
    memory_limits: Sequence[int] = (),
    must_fit: bool = True,
    lead_weight: float | None = None,
    state_factor: float = 4.0,
    speeds: Sequence[float] = (),
) -> _C.PartitionOptions:
    """Returns the options of the partitioner for a configuration.

    Args:
        config: configuration; its schedule determines the kept microbatches of each rank.
        pp_size: number of partitions.
        num_chunks: stages per partition, for schedules with virtual stages.
        memory_limits: limit of bytes on each partition; empty for no limits.
        must_fit: whether the limits are strict; if not, the partition with the least memory is
            taken where none keeps the limits.
        lead_weight: share of the time of earlier stages that counts for a stage, where only time
            is balanced; None balances as ``config`` says.
        state_factor: bytes of a parameter with gradient and optimizer state, per parameter byte.
        speeds: speed of the device of each partition in any one unit; empty: all are alike.
    """
    weight = 0.8 if config.memory_weight is None else config.memory_weight
    return _C.PartitionOptions(
        pp_size,
        memory_weight=weight if lead_weight is None else 0.0,
        num_chunks=num_chunks,
        kept_microbatches=kept_microbatches(config, pp_size, num_chunks),
        memory_limits=memory_limits,
        must_fit=must_fit,
        lead_weight=lead_weight or 0.0,
        state_factor=state_factor,
        speeds=speeds,
    )


def kept_microbatches(config: PartitionConfig, pp_size: int, num_chunks: int = 1) -> list[int]:
    """Returns the number of microbatches whose activations the schedule keeps, by rank."""
    active = config.microbatches
    if config.active_microbatches is not None:
        active = min(active, config.active_microbatches)
    return kept_by(config.pipeline, pp_size, num_chunks, config.microbatches, active)


def kept_by(
    policy_name: str, pp_size: int, num_chunks: int, microbatches: int, active: int
) -> list[int]:
    """Returns the same as `kept_microbatches`, with the schedule given by name and numbers."""
    policy = _C.make_policy(policy_name)
    if pp_size == 1 and not policy.forwards_come_first:
        return [1]  # nothing comes between a forward and its backward
    return policy.kept_microbatches(pp_size, num_chunks, microbatches, active)


def decide(
    root: nn.Module,
    config: PartitionConfig,
    pp_size: int,
    mark: Callable[[nn.Module], int | None] = mark_of,
    *,
    index: ModuleIndex | None = None,
    file: str | Path | None = None,
    num_chunks: int = 1,
    memory_limits: Sequence[int] = (),
    speeds: Sequence[float] = (),
    fastest: Fastest | None = None,
) -> Decision:
    """Assigns every module to a pipeline rank. The result is deterministic; no collective.

    Args:
        root: the user's model.
        config: configuration. With ``auto_partition`` the module tree is balanced by
            ``memory_weight``, around modules that `set_partition` has placed; without, marks count
            and unmarked modules are placed on ``default_partition``.
        pp_size: number of partitions.
        mark: function that returns the user's mark of a module.
        index: the module tree of ``root``, with costs if it was traced.
        file: a partition file (see `smp.partition.partition_file`) to follow instead.
        num_chunks: stages per rank, for schedules with virtual stages; with ``auto_partition``.
        memory_limits: limit of bytes on each rank; empty for no limits.
        speeds: speed of each rank's device in any one unit; empty: all are alike.
        fastest: input for the search of the shortest step, which ``auto_partition`` uses instead
            of a balance by ``memory_weight``.

    Raises:
        WishError: with ``auto_partition``, modules that must stay together are set to different
            partitions.
        ValueError: a mark is out of range; modules that must stay together are marked for
            different partitions; the model has too few modules for ``pp_size``, or is too large
            for the memory limit; the file does not fit the model.
    """
    index = build_tree(root) if index is None else index
    options = partition_options(config, pp_size, num_chunks, memory_limits, speeds=speeds)
    if file is not None:
        assignment = partition_file.read(file, index, pp_size, num_chunks)
        _check_memory(index, assignment, options)
        return Decision.of(index, assignment, options, "file")
    marks = [mark(module) for module in index.modules]
    for idx, wish in enumerate(marks):
        if wish is not None:
            check_index(f"partition of module {_label(index, idx)}", wish, pp_size)
    if config.auto_partition:
        wishes = [wish_of(module) for module in index.modules]
        if pp_size > 1 and any(
            m is not None and w is None for m, w in zip(marks, wishes, strict=True)
        ):
            first_rank_log.warning(
                "smp: partitions of smp.partition are ignored, because auto_partition is True; set "
                "it to False to use them, or place single modules by smp.set_partition"
            )
        add_wishes(index, wishes, pp_size)
        if fastest is not None and pp_size > 1:
            make = partial(partition_options, config, pp_size, num_chunks)
            return _decide_fastest(index, make, memory_limits, speeds, fastest)
        return Decision.of(index, solve(index, options), options)
    if num_chunks > 1:
        raise ValueError(
            f"{_C.rank_prefix()}partition: {num_chunks} chunks per rank need auto_partition=True "
            "or a partition file, since smp.partition names ranks only"
        )
    idxs = _place_by_marks(index, marks, config.default_partition)
    assignment = _C.make_assignment(index.tree, pp_size, idxs)
    _check_memory(index, assignment, options)
    return Decision.of(index, assignment, options, "marks")


@dataclass(frozen=True)
class Fastest:
    """The quantities that the shortest step depends on.

    Attributes:
        shape: shape of the step.
        rooms: bytes of memory of each pipeline rank; the limits where no others are given.
        state_factor: bytes of a parameter with gradient and optimizer state, per parameter byte.
    """

    shape: StepShape
    rooms: tuple[int, ...] = ()
    state_factor: float = 4.0


# Factors by which the speed of a rank is changed in the search among cuts for uneven devices.
_NUDGES = (1.25, 0.8, 1.08, 1 / 1.08)
_MOST_NUDGED = 64  # partitions that the search looks at
_LEAST_GAIN = 0.999


def _decide_fastest(
    index: ModuleIndex,
    make_options: Callable[..., _C.PartitionOptions],
    memory_limits: Sequence[int],
    speeds: Sequence[float],
    fastest: Fastest,
) -> Decision:
    def found_with(lead: float, assumed: Sequence[float]) -> Candidate:
        make = partial(
            make_options,
            memory_limits=memory_limits or fastest.rooms,
            must_fit=bool(memory_limits),
            lead_weight=lead,
            state_factor=fastest.state_factor,
        )
        assignment = solve(index, make(speeds=assumed))
        return candidate(index.tree, assignment, make(speeds=speeds), fastest.shape)

    found = [found_with(lead, speeds) for lead in fastest.shape.leads]
    best = choose(found)
    if len(set(speeds)) > 1:
        nudged = _nudged(found_with, best, speeds)
        found, best = [*found, nudged], choose([*found, nudged])
    if not memory_limits:
        _warn_of_memory(best, fastest.rooms)
    decision = Decision.of(index, best.assignment, best.options)
    return replace(decision, step_ratio=best.step_ratio, considered=tuple(found))


def _nudged(
    found_with: Callable[[float, Sequence[float]], Candidate],
    best: Candidate,
    speeds: Sequence[float],
) -> Candidate:
    """Returns the shortest step among partitions for speeds near the true ones.

    The largest load is a bound of a step, and between uneven devices a loose one: a slow rank in
    front delays others in another way than one behind. So the partitioner is asked for a little
    more or less work on a rank, again and again, and the simulator decides.

    Args:
        found_with: function of a lead weight and of assumed speeds that returns a candidate.
        best: candidate to begin with.
        speeds: true speeds.
    """
    lead, factors = best.options.lead_weight, [1.0] * len(speeds)
    tried = 0
    improves = best.step_ratio is not None
    while improves and tried < _MOST_NUDGED:
        improves = False
        for idx, nudge in itertools.product(range(len(speeds)), _NUDGES):
            trial = [f * (nudge if i == idx else 1.0) for i, f in enumerate(factors)]
            one = found_with(lead, [s * f for s, f in zip(speeds, trial, strict=True)])
            tried += 1
            assert one.step_ratio is not None and best.step_ratio is not None, "costs are known"
            fits = one.excess_bytes <= best.excess_bytes
            if fits and one.step_ratio < _LEAST_GAIN * best.step_ratio:
                best, factors, improves = one, trial, True
    return best


def _warn_of_memory(taken: Candidate, rooms: Sequence[int]) -> None:
    """Warns that a partition does not fit into the memory of its ranks, if it does not."""
    if taken.excess_bytes == 0:
        return
    needed = taken.rank_bytes
    largest = max(range(len(rooms)), key=lambda rank: needed[rank] - rooms[rank])
    first_rank_log.warning(
        "smp: no partition was found that fits into the memory of a rank (%.2f GB): the one "
        "with the least memory is taken, whose largest rank (pp_rank %d) needs %.2f GB by estimate "
        "(parameters times %g for gradients and optimizer, and activations); use a larger "
        "pipeline_parallel_degree, smaller or fewer active microbatches, or checkpoint "
        "activations",
        rooms[largest] / 1e9,
        largest,
        needed[largest] / 1e9,
        taken.options.state_factor,
    )


class WishError(ValueError):
    """Wishes by `set_partition` contradict each other or the model."""


def add_wishes(index: ModuleIndex, wishes: Sequence[int | None], pp_size: int) -> None:
    """Adds the places that `set_partition` has asked for to the tree.

    Args:
        index: the module tree.
        wishes: partition per module, or None; the root's is ignored.
        pp_size: number of partitions.

    Raises:
        WishError: modules that must stay together are set to different partitions.
    """
    for idx, wish in enumerate(wishes):
        if wish is not None and idx > 0:
            index.tree.set_wish(idx, wish)
    for tie in index.shared:
        pair = (wishes[tie.owner_idx], wishes[tie.alias_idx])
        if 0 not in (tie.owner_idx, tie.alias_idx) and None not in pair and pair[0] != pair[1]:
            raise WishError(_shared_apart(index, tie, f"set to {pair[0]}", f"set to {pair[1]}"))
    try:
        _C.check_wishes(index.tree, pp_size)
    except ValueError as error:
        raise WishError(str(error)) from None


def solve(index: ModuleIndex, options: _C.PartitionOptions) -> _C.Assignment:
    """Returns the best partition that keeps callers of modules with writing hooks on partition 0.

    The hooks then write where the step body runs.

    Raises:
        ValueError: no such partition exists, or the forward replaces modules.
    """
    _refuse_new_modules(index)
    assignment = _C.solve_partition(index.tree, options)
    pinned: set[int] = set()
    while away := _callers_away(index, assignment.partition_idxs) - pinned:
        for caller in away:
            smallest = smallest_below(index.modules[caller])
            assert smallest is not None, "a module without state is on no rank of its own"
            index.tree.tie(0, index.modules.index(smallest))
        pinned |= away
        try:
            assignment = _C.solve_partition(index.tree, options)
        except ValueError as error:
            names = sorted(index.names[idx][0] for idx in index.writes.observed)
            raise ValueError(
                f"{error}. Hooks of {', '.join(map(repr, names[:4]))} keep something outside of "
                "the model, so the code that calls these modules has to be on partition 0, which "
                "leaves too few others; remove the hooks, or use fewer partitions"
            ) from None
    return assignment


def _refuse_new_modules(index: ModuleIndex) -> None:
    names = sorted(
        f"{index.names[idx][0]}.{name}".lstrip(".") for idx, name in index.writes.replaced
    )
    if names:
        raise ValueError(
            f"{_C.rank_prefix()}partition: the forward puts other modules into the place of "
            f"{', '.join(map(repr, names[:4]))}{' and others' if len(names) > 4 else ''}, which "
            "other ranks would not see; call what does so before smp.DistributedModel (for example "
            "one forward on a batch of the same shapes), so that all ranks have the new ones; if "
            "each forward does so, leave the model whole (pipeline_parallel_degree=1)"
        )


def _callers_away(index: ModuleIndex, partition_idxs: Sequence[int]) -> set[int]:
    """Returns modules above observed ones whose code runs elsewhere than the step body."""
    away = set()
    for observed in index.writes.observed:
        idx = index.parents[observed]
        while idx > 0:
            if partition_idxs[idx] != 0 and index.has_parameters[idx]:
                away.add(idx)
            idx = index.parents[idx]
    return away


def _check_memory(
    index: ModuleIndex, assignment: _C.Assignment, options: _C.PartitionOptions
) -> None:
    needed = _C.evaluate_partition(index.tree, assignment, options).memory_bytes
    for pp_rank, limit in enumerate(options.memory_limits):
        num_bytes = needed[pp_rank]
        if num_bytes > limit:
            raise ValueError(
                f"{_C.rank_prefix()}partition: pp_rank {pp_rank} needs {int(num_bytes)} bytes, "
                f"{int(num_bytes) - limit} more than the limit of {limit}; move modules away from "
                "it, or let auto_partition=True find a balance"
            )


def _place_by_marks(index: ModuleIndex, marks: list[int | None], default: int) -> list[int]:
    """Returns the partition per node: by marks or default, or as the parent without parameters."""
    idxs = [0]  # the root runs on the driver
    for idx in range(1, len(index.modules)):
        anchor = index.anchors[idx]
        wish = marks[idx]
        if not index.has_parameters[idx]:
            idxs.append(idxs[index.parents[idx]])
        elif anchor != idx:
            if wish is not None and wish != idxs[anchor]:
                raise ValueError(
                    f"{_C.rank_prefix()}partition: module {_label(index, idx)} is set to partition "
                    f"{wish}, but must stay with {_label(index, anchor)} "
                    f"({type(index.modules[anchor]).__name__}) on partition {idxs[anchor]}; set "
                    "both to the same partition"
                )
            idxs.append(idxs[anchor])
        else:
            idxs.append(default if wish is None else wish)
    _check_shared(index, idxs)
    return idxs


def _check_shared(index: ModuleIndex, idxs: list[int]) -> None:
    for tie in index.shared:
        owner, alias = idxs[tie.owner_idx], idxs[tie.alias_idx]
        if owner != alias:
            raise ValueError(
                _shared_apart(index, tie, f"partition {owner}", f"partition {alias}")
                + ", or auto_partition=True"
            )


def _shared_apart(index: ModuleIndex, tie: SharedParameter, owner: str, alias: str) -> str:
    return (
        f"{_C.rank_prefix()}partition: modules {_label(index, tie.owner_idx)} ({owner}) and "
        f"{_label(index, tie.alias_idx)} ({alias}) share the parameter "
        f"'{_join(index.names[tie.owner_idx][0], tie.owner_name)}' and must be on one partition; "
        "use the same index for both"
    )


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def _label(index: ModuleIndex, idx: int) -> str:
    return repr(index.names[idx][0]) if idx > 0 else "(root)"


def agree(decision: Decision, world_size: int) -> None:
    """Checks that all ranks decided the same. Collective over all ranks.

    Args:
        decision: decision of this rank.
        world_size: number of ranks.

    Raises:
        ValueError: decisions differ; every rank raises it with the same text.
    """
    if world_size == 1:
        return
    digests = comm.allgather(decision.digest, comm.WORLD)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not others:
        return
    lines = comm.allgather(decision.lines, comm.WORLD)
    raise ValueError(
        f"smp: ranks {others} have another model or partition than rank 0; "
        f"{first_difference(lines[0], lines[others[0]], others[0])}. Build the same modules on "
        "every rank, and use the same smp.partition indices"
    )


def first_difference(expected: list[str], got: list[str], other_rank: int) -> str:
    """Returns in words where the modules of rank 0 and of another rank first differ."""
    for ours, theirs in zip(expected, got, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours}, rank {other_rank} has {theirs}"
    return f"rank 0 has {len(expected)} modules, rank {other_rank} has {len(got)}"
