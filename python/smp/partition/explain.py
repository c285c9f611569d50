"""Explains a partition, in figures and in words."""

from __future__ import annotations

from dataclasses import dataclass

import smp._C as _C
from smp.partition.decision import Decision


@dataclass(frozen=True)
class RankCost:
    """The work and memory of one pipeline rank.

    Attributes:
        pp_rank: the rank.
        param_bytes: bytes of its parameters.
        activation_bytes: bytes of activations of one microbatch, with copies of received tensors.
        memory_bytes: bytes at the peak: parameters with gradients and optimizer state, and
            activations of as many microbatches as the schedule keeps.
        compute_share: share of all arithmetic, in [0, 1].
        transfer_bytes: bytes sent and received per microbatch.
        load: quantity that is balanced; 1 is the whole model without transfers. In the fastest
            partition, ranks in front may have more.
    """

    pp_rank: int
    param_bytes: int
    activation_bytes: int
    memory_bytes: int
    compute_share: float
    transfer_bytes: int
    load: float


@dataclass(frozen=True)
class Move:
    """The cost of the partition if a module were on another rank.

    Attributes:
        pp_rank: the other rank.
        largest_load: largest load of a rank after the move.
        crossing_bytes: bytes between ranks, per microbatch.
        refusal: reason why the move is impossible; empty if it is possible.
    """

    pp_rank: int
    largest_load: float
    crossing_bytes: int
    refusal: str = ""


@dataclass(frozen=True)
class ModulePlacement:
    """The place of a module, with its reason.

    Attributes:
        name: qualified name.
        pp_rank: rank of the module.
        reason: reason for the place, in words.
        moves: one entry for each other rank.
    """

    name: str
    pp_rank: int
    reason: str
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Explanation:
    """A partition in figures; its text is a table.

    Attributes:
        ranks: one entry for each pipeline rank.
        boundaries: bytes per microbatch by (from, to); forward and gradients.
        largest_load: quantity that is minimized.
        crossing_bytes: sum of ``boundaries``.
        traced: whether costs other than parameters are known.
        assignments: modules of each rank, as in the log.
        module: place of the module that was asked for.
        step_ratio: estimated time of a step over that of ranks which are always and equally busy;
            None if the fastest partition was not searched.
    """

    ranks: tuple[RankCost, ...]
    boundaries: dict[tuple[int, int], int]
    largest_load: float
    crossing_bytes: int
    traced: bool
    assignments: str
    module: ModulePlacement | None = None
    step_ratio: float | None = None

    def __str__(self) -> str:
        lines = [self.assignments, *_rank_lines(self), *_boundary_lines(self)]
        if self.step_ratio is not None:
            lines.append(
                f"A step takes {self.step_ratio:.3f} of the time of ranks that never wait, by "
                "estimate; the partition is the fastest that was found to fit."
            )
        if self.module is not None:
            lines += _module_lines(self, self.module)
        return "\n".join(lines)


def explain(decision: Decision, module: str | None = None) -> Explanation:
    """Explains a partition and, on request, the place of one module.

    Args:
        decision: result of `decide`; only the rank with a trace has costs other than parameters.
        module: qualified name; the model's own name is "".

    Raises:
        ValueError: there is no such module.
    """
    tree, assignment = decision.index.tree, decision.assignment
    options = decision.options
    if options is None:
        options = _C.PartitionOptions(decision.num_partitions, num_chunks=decision.num_chunks)
    evaluation = _C.evaluate_partition(tree, assignment, options)
    size = decision.num_partitions
    boundaries = {
        divmod(i, size): num_bytes
        for i, num_bytes in enumerate(evaluation.boundary_bytes)
        if num_bytes
    }
    return Explanation(
        ranks=tuple(_rank_cost(evaluation, r, size) for r in range(size)),
        boundaries=boundaries,
        largest_load=evaluation.largest_load,
        crossing_bytes=evaluation.crossing_bytes,
        traced=tree.num_values > 0 or sum(evaluation.compute) > 0,
        assignments=decision.text,
        module=None if module is None else _placement(decision, options, module),
        step_ratio=decision.step_ratio,
    )


def _rank_cost(evaluation: _C.Evaluation, pp_rank: int, size: int) -> RankCost:
    stages = range(pp_rank, len(evaluation.loads), size)
    total = sum(evaluation.compute)
    compute = sum(evaluation.compute[s] for s in stages)
    return RankCost(
        pp_rank=pp_rank,
        param_bytes=int(sum(evaluation.param_bytes[s] for s in stages)),
        activation_bytes=int(sum(evaluation.activation_bytes[s] for s in stages)),
        memory_bytes=int(evaluation.memory_bytes[pp_rank]),
        compute_share=compute / total if total else 0.0,
        transfer_bytes=sum(evaluation.transfer_bytes[s] for s in stages),
        load=sum(evaluation.loads[s] for s in stages),
    )


def _placement(decision: Decision, options: _C.PartitionOptions, name: str) -> ModulePlacement:
    if name not in decision.partition_of_name:
        raise ValueError(
            f"{_C.rank_prefix()}explain_partition: the model has no module '{name}'; names are "
            "those of named_modules()"
        )
    idx = next(i for i, names in enumerate(decision.index.names) if name in names)
    here = decision.partition_idxs[idx]
    others = [r for r in range(decision.num_partitions) if r != here]
    return ModulePlacement(
        name=name,
        pp_rank=here,
        reason=_reason(decision, idx),
        moves=tuple(_move(decision, options, idx, other) for other in others),
    )


def _move(decision: Decision, options: _C.PartitionOptions, idx: int, pp_rank: int) -> Move:
    tree = decision.index.tree
    try:
        if idx == 0:
            raise ValueError("the root module runs on partition 0, where the step begins")
        moved = _C.move_in_partition(tree, decision.assignment, idx, pp_rank)
    except ValueError as error:
        return Move(pp_rank, float("inf"), 0, refusal=str(error))
    evaluation = _C.evaluate_partition(tree, moved, options)
    return Move(pp_rank, evaluation.largest_load, evaluation.crossing_bytes)


def _reason(decision: Decision, idx: int) -> str:
    placement = _C.explain_placement(decision.index.tree, decision.assignment, idx)
    other = decision.names[placement.other_idx] or "the model itself"
    rule = _C.PlacementRule
    if decision.decided_by == "marks" and 0 < idx and decision.index.has_parameters[idx]:
        return "smp.partition, set_partition or default_partition puts it here"
    if placement.rule == rule.ASKED:
        if placement.other_idx == idx:
            return "set_partition puts it here"
        return f"it stays with '{other}', which set_partition puts here"
    if placement.rule == rule.DRIVER:
        return "it runs where the step begins, or shares a parameter with what has to run there"
    if placement.rule == rule.TIED:
        return f"it stays with '{other}': they share a parameter, or belong to one whole module"
    if placement.rule == rule.FOLLOWS:
        return f"it has no parameters and goes with '{other}'"
    if placement.rule == rule.SPLIT:
        ranks = sorted(
            {
                decision.partition_idxs[i]
                for i in range(len(decision.names))
                if _is_below(decision, i, idx) and decision.index.has_parameters[i]
            }
        )
        return (
            f"modules below it are on ranks {', '.join(map(str, ranks))}, so its own code runs "
            "where the step begins"
        )
    if placement.rule == rule.TOGETHER:
        return "everything below it is on this rank"
    if decision.decided_by == "file":
        return "the partition file puts it here"
    least = "the largest load is smallest" if decision.step_ratio is None else "a step is shortest"
    return f"it was placed in the order of execution such that {least}"


def _is_below(decision: Decision, idx: int, above: int) -> bool:
    while idx > above:
        idx = decision.index.parents[idx]
    return idx == above


def _rank_lines(explanation: Explanation) -> list[str]:
    head = ("pp_rank", "parameters", "activations", "memory", "compute", "transfers", "load")
    rows = [
        (
            str(rank.pp_rank),
            _bytes(rank.param_bytes),
            _bytes(rank.activation_bytes),
            _bytes(rank.memory_bytes),
            f"{100 * rank.compute_share:.1f} %",
            _bytes(rank.transfer_bytes),
            f"{rank.load:.4f}",
        )
        for rank in explanation.ranks
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in [head, *rows]
    ]
    if not explanation.traced:
        lines.append("Only parameters are known here: the model was not traced on this rank.")
    return lines


def _boundary_lines(explanation: Explanation) -> list[str]:
    if not explanation.boundaries:
        return []
    lines = ["Bytes between ranks per microbatch, gradients included:"]
    for (source, target), num_bytes in sorted(explanation.boundaries.items()):
        lines.append(f"  {source} -> {target}: {_bytes(num_bytes)}")
    return lines


def _module_lines(explanation: Explanation, module: ModulePlacement) -> list[str]:
    lines = [f"'{module.name}' is on pp_rank {module.pp_rank}: {module.reason}."]
    for move in module.moves:
        if move.refusal:
            lines.append(f"  on {move.pp_rank}: not possible: {move.refusal}")
            continue
        change = move.largest_load / explanation.largest_load - 1 if explanation.largest_load else 0
        crossing = move.crossing_bytes - explanation.crossing_bytes
        lines.append(
            f"  on {move.pp_rank}: largest load {move.largest_load:.4f} ({100 * change:+.1f} %), "
            f"{_bytes(abs(crossing))} {'more' if crossing >= 0 else 'less'} between ranks"
        )
    return lines


def _bytes(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
