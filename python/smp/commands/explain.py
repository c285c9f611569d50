"""``smp explain``: explains a partition offline, and estimates what another one would cost."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smp.commands.decided import Decided, add_arguments, decide
from smp.commands.ending import DONE, NO, BadUse, guarded
from smp.commands.printing import bytes_text, print_json
from smp.commands.report import Block, Heading, Table, Text, bars, print_blocks, write_page
from smp.partition import partition_file
from smp.partition.decision import Decision
from smp.partition.explain import Explanation, explain
from smp.partition.fastest import Candidate
from smp.planning.reasons import (
    ModuleCosts,
    bounds_in_words,
    bounds_of,
    module_costs,
    what_if,
)

_RANKS = ("pp_rank", "parameters", "activations", "memory", "compute", "transfers", "load")
_MODULES = ("module", "pp_rank", "compute", "parameters", "activations")
_CONSIDERED = ("candidate", "taken", "time of a step", "memory of the largest rank")
_COMPARED = ("", "now", "what if")


def add_parser(subparsers: Any) -> None:
    """Adds the command ``explain``. Exit status 1: a what-if does not fit; 2: bad use."""
    parser = subparsers.add_parser(
        "explain",
        help="why a partition is as it is, and what another would cost",
        description="Explains the partition that a run would have: one process, no device, no "
        "weights. Figures are estimates from FLOPs and bytes.",
    )
    add_arguments(parser)
    parser.add_argument("--module", metavar="NAME", help="also why this module is where it is")
    parser.add_argument(
        "--what-if",
        nargs="+",
        default=[],
        metavar="NAME=RANK",
        help="what the partition would cost with these modules on other ranks",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write a partition file, to be edited"
    )
    parser.set_defaults(execute=guarded("explain", _run))


def _run(arguments: argparse.Namespace) -> int:
    moves = dict(_move(word) for word in arguments.what_if)
    decided = decide(arguments)
    decision = decided.decision
    try:
        found = explain(decision, arguments.module)
        other = what_if(decision, moves, decided.config) if moves else None
        if arguments.write is not None:
            partition_file.write(decision if other is None else other, arguments.write)
    except (ValueError, OSError) as error:
        raise BadUse(str(error)) from None
    changed = None if other is None else explain(other)
    title, blocks = _title(decided), _blocks(decided, found, changed)
    if arguments.page is not None:
        write_page(arguments.page, f"Partition of {title}", blocks)
    if arguments.json:
        print_json(_facts(decided, found, other, changed))
    else:
        print_blocks([Text(title), *blocks])
    limit = arguments.memory
    is_too_large = changed is not None and any(
        limit is not None and rank.memory_bytes > limit for rank in changed.ranks
    )
    return NO if is_too_large else DONE


def _move(word: str) -> tuple[str, int]:
    name, separator, rank = word.rpartition("=")
    if not separator or not name or not rank.isdecimal():
        raise BadUse(f"--what-if {word!r} is not NAME=RANK, as h.7.mlp=1")
    return name, int(rank)


def _rank_table(found: Explanation) -> Table:
    rows = [
        [
            str(rank.pp_rank),
            bytes_text(rank.param_bytes),
            bytes_text(rank.activation_bytes),
            bytes_text(rank.memory_bytes),
            f"{100 * rank.compute_share:.1f} %",
            bytes_text(rank.transfer_bytes),
            f"{rank.load:.4f}",
        ]
        for rank in found.ranks
    ]
    return Table(_RANKS, rows, text_columns=0)


def _module_table(costs: list[ModuleCosts]) -> Table:
    rows = [
        [
            cost.name or "(root)",
            str(cost.pp_rank),
            f"{100 * cost.compute_share:.1f} %",
            bytes_text(cost.param_bytes),
            bytes_text(cost.activation_bytes),
        ]
        for cost in costs
    ]
    return Table(_MODULES, rows)


def _candidate_table(decision: Decision) -> Table:
    taken = tuple(decision.partition_idxs)
    rows = [
        [
            _name_of(candidate),
            "yes" if tuple(candidate.assignment.partition_idxs) == taken else "",
            "-" if candidate.step_ratio is None else f"{candidate.step_ratio:.3f}",
            bytes_text(candidate.memory_bytes),
        ]
        for candidate in decision.considered
    ]
    return Table(_CONSIDERED, rows, text_columns=2)


def _name_of(candidate: Candidate) -> str:
    lead = candidate.options.lead_weight
    if not lead:
        return "all ranks alike"
    return f"ranks in front may have {100 * lead:.3g} % more"


def _comparison_table(found: Explanation, changed: Explanation) -> Table:
    def of(explanation: Explanation) -> list[str]:
        ratio = explanation.step_ratio
        return [
            "-" if ratio is None else f"{ratio:.3f}",
            f"{explanation.largest_load:.4f}",
            bytes_text(max(rank.memory_bytes for rank in explanation.ranks)),
            bytes_text(explanation.crossing_bytes),
        ]

    names = ("time of a step", "largest load", "memory of the largest rank", "between ranks")
    return Table(_COMPARED, list(zip(names, of(found), of(changed), strict=True)))


def _boundaries(found: Explanation) -> list[str]:
    return [
        f"{source} -> {target}: {bytes_text(num_bytes)} per microbatch, gradients included"
        for (source, target), num_bytes in sorted(found.boundaries.items())
    ]


def _why(found: Explanation) -> list[str]:
    module = found.module
    if module is None:
        return []
    lines = [f"'{module.name}' is on rank {module.pp_rank}: {module.reason}."]
    for move in module.moves:
        if move.refusal:
            lines.append(f"on rank {move.pp_rank}: not possible: {move.refusal}")
        else:
            change = 100 * (move.largest_load / found.largest_load - 1) if found.largest_load else 0
            lines.append(
                f"on rank {move.pp_rank}: largest load {move.largest_load:.4f} ({change:+.1f} %), "
                f"{bytes_text(move.crossing_bytes)} between ranks"
            )
    return lines


def _title(decided: Decided) -> str:
    how = {
        "auto": "found automatically",
        "file": "from a partition file",
        "marks": "from marks in the model",
    }[decided.decision.decided_by]
    return f"{decided.loaded.trained} on {decided.decision.num_partitions} ranks, {how} (predicted)"


def _blocks(decided: Decided, found: Explanation, changed: Explanation | None) -> list[Block]:
    decision, config = decided.decision, decided.config
    costs = module_costs(decision)
    words = bounds_in_words(bounds_of(decision, config), config.microbatches)
    blocks: list[Block] = [_rank_table(found), *map(Text, _boundaries(found))]
    blocks += [Heading("What bounds it"), *map(Text, words)]
    if decision.considered:
        blocks += [Heading("Candidates"), _candidate_table(decision)]
    shares = [(f"{cost.name or '(root)'} on {cost.pp_rank}", cost.compute_share) for cost in costs]
    blocks += [Heading("Modules"), bars(shares), _module_table(costs)]
    blocks += map(Text, _why(found))
    if changed is not None:
        blocks += [Heading("What if"), _comparison_table(found, changed), _rank_table(changed)]
    return blocks


def _facts(
    decided: Decided,
    found: Explanation,
    other: Decision | None,
    changed: Explanation | None,
) -> dict[str, Any]:
    decision = decided.decision
    bounds = bounds_of(decision, decided.config)
    facts = {
        "model": decided.loaded.name,
        "decided_by": decision.decided_by,
        **_in_figures(found),
        "bounds": asdict(bounds),
        "considered": [
            {
                "lead_weight": candidate.options.lead_weight,
                "step_ratio": candidate.step_ratio,
                "memory_bytes": candidate.memory_bytes,
                "is_taken": tuple(candidate.assignment.partition_idxs) == decision.partition_idxs,
            }
            for candidate in decision.considered
        ],
        "modules": [asdict(cost) for cost in module_costs(decision)],
        "module": None if found.module is None else _module_facts(found),
    }
    if changed is not None and other is not None:
        facts["what_if"] = {
            **_in_figures(changed),
            "modules": [asdict(cost) for cost in module_costs(other)],
        }
    return facts


def _in_figures(found: Explanation) -> dict[str, Any]:
    return {
        "ranks": [asdict(rank) for rank in found.ranks],
        "boundaries": [
            {"from": source, "to": target, "bytes": num_bytes}
            for (source, target), num_bytes in sorted(found.boundaries.items())
        ],
        "largest_load": found.largest_load,
        "crossing_bytes": found.crossing_bytes,
        "step_ratio": found.step_ratio,
    }


def _module_facts(found: Explanation) -> dict[str, Any]:
    assert found.module is not None
    facts = asdict(found.module)
    for move in facts["moves"]:  # JSON has no infinity
        move["largest_load"] = None if move["refusal"] else move["largest_load"]
    return facts
