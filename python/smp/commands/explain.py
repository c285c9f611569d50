"""``smp explain``: explains a partition offline, and estimates what another one would cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smp.commands.arguments import Traced, add_pipeline_run, traced_pipeline
from smp.commands.ending import DONE, NO, BadUse, guarded
from smp.commands.printing import bytes_text, print_json
from smp.commands.report import Block, Heading, Table, Text, print_blocks, write_page
from smp.partition import partition_file
from smp.partition.decision import Decision
from smp.partition.explain import Explanation, ModulePlacement, explain
from smp.partition.fastest import Candidate
from smp.planning.reasons import (
    ModuleCosts,
    bounds_in_words,
    bounds_of,
    module_costs,
    what_if,
)


def add_parser(subparsers: Any) -> None:
    """Adds the command ``explain``. Exit status 1: a what-if does not fit; 2: bad use."""
    parser = subparsers.add_parser(
        "explain",
        help="why a partition is as it is, and what another would cost",
        description="Explains the partition that a run would have: one process, no device, no "
        "weights. Figures are estimates from FLOPs and bytes.",
    )
    add_pipeline_run(parser)
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
    traced = traced_pipeline(arguments)
    decision = traced.found.decision
    try:
        found = explain(decision, arguments.module)
        other = what_if(decision, moves, traced.run) if moves else None
        if arguments.write is not None:
            partition_file.write(decision if other is None else other, arguments.write)
    except (ValueError, OSError) as error:
        raise BadUse(str(error)) from None
    changed = None if other is None else explain(other)
    title, blocks = _title(traced), _blocks(traced, found, changed)
    if arguments.page is not None:
        write_page(arguments.page, f"Partition of {title}", blocks)
    if arguments.json:
        print_json(_facts(traced, found, other, changed))
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
        {
            "pp_rank": rank.pp_rank,
            "parameters": bytes_text(rank.param_bytes),
            "activations": bytes_text(rank.activation_bytes),
            "memory": bytes_text(rank.memory_bytes),
            "compute": f"{100 * rank.compute_share:.1f} %",
            "transfers": bytes_text(rank.transfer_bytes),
            "load": f"{rank.load:.4f}",
        }
        for rank in found.ranks
    ]
    return Table.of(rows, text_columns=0)


def _module_table(costs: list[ModuleCosts]) -> Table:
    rows = [
        {
            "module": cost.name or "(root)",
            "pp_rank": cost.pp_rank,
            "compute": f"{100 * cost.compute_share:.1f} %",
            "parameters": bytes_text(cost.param_bytes),
            "activations": bytes_text(cost.activation_bytes),
        }
        for cost in costs
    ]
    return Table.of(rows)


def _candidate_table(decision: Decision) -> Table:
    rows = [
        {
            "candidate": _name_of(candidate),
            "taken": "yes" if _is_taken(candidate, decision) else "",
            "time of a step": _ratio_text(candidate.step_ratio),
            "memory of the largest rank": bytes_text(candidate.memory_bytes),
        }
        for candidate in decision.considered
    ]
    return Table.of(rows, text_columns=2)


def _is_taken(candidate: Candidate, decision: Decision) -> bool:
    return tuple(candidate.assignment.partition_idxs) == tuple(decision.partition_idxs)


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _name_of(candidate: Candidate) -> str:
    lead = candidate.options.lead_weight
    if not lead:
        return "all ranks alike"
    return f"ranks in front may have {100 * lead:.3g} % more"


def _comparison_table(found: Explanation, changed: Explanation) -> Table:
    figures: dict[str, Callable[[Explanation], str]] = {
        "time of a step": lambda one: _ratio_text(one.step_ratio),
        "largest load": lambda one: f"{one.largest_load:.4f}",
        "memory of the largest rank": lambda one: bytes_text(
            max(rank.memory_bytes for rank in one.ranks)
        ),
        "between ranks": lambda one: bytes_text(one.crossing_bytes),
    }
    return Table.of(
        [{"": name, "now": of(found), "what if": of(changed)} for name, of in figures.items()]
    )


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


def _title(traced: Traced) -> str:
    decision = traced.found.decision
    how = {
        "auto": "found automatically",
        "file": "from a partition file",
        "marks": "from marks in the model",
    }[decision.decided_by]
    return f"{traced.loaded.trained} on {decision.num_partitions} ranks, {how} (predicted)"


def _blocks(traced: Traced, found: Explanation, changed: Explanation | None) -> list[Block]:
    decision, run = traced.found.decision, traced.run
    words = bounds_in_words(bounds_of(decision, run), run.layout.microbatches)
    blocks: list[Block] = [_rank_table(found), *map(Text, _boundaries(found))]
    blocks += [Heading("What bounds it"), *map(Text, words)]
    if decision.considered:
        blocks += [Heading("Candidates"), _candidate_table(decision)]
    blocks += [Heading("Modules"), _module_table(module_costs(decision)), *map(Text, _why(found))]
    if changed is not None:
        blocks += [Heading("What if"), _comparison_table(found, changed), _rank_table(changed)]
    return blocks


def _facts(
    traced: Traced, found: Explanation, other: Decision | None, changed: Explanation | None
) -> dict[str, Any]:
    decision = traced.found.decision
    facts = {
        "model": traced.loaded.name,
        "decided_by": decision.decided_by,
        **_in_figures(found),
        "bounds": asdict(bounds_of(decision, traced.run)),
        "considered": [
            {
                "lead_weight": candidate.options.lead_weight,
                "step_ratio": candidate.step_ratio,
                "memory_bytes": candidate.memory_bytes,
                "is_taken": _is_taken(candidate, decision),
            }
            for candidate in decision.considered
        ],
        "modules": [asdict(cost) for cost in module_costs(decision)],
        "module": None if found.module is None else _module_facts(found.module),
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


def _module_facts(module: ModulePlacement) -> dict[str, Any]:
    facts = asdict(module)
    for move in facts["moves"]:  # JSON has no infinity
        move["largest_load"] = None if move["refusal"] else move["largest_load"]
    return facts
