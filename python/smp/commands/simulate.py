"""``smp simulate``: shows the schedule of a plan, and proves that it cannot deadlock."""

from __future__ import annotations

import argparse
from typing import Any

from smp.commands.arguments import Traced, add_pipeline_run, traced_pipeline
from smp.commands.ending import DONE, BadUse, guarded
from smp.commands.printing import bytes_text, print_json
from smp.commands.report import (
    Block,
    Heading,
    Listing,
    OnPage,
    Table,
    Text,
    folded,
    print_blocks,
    timeline,
    write_page,
)
from smp.pipeline import schedules
from smp.pipeline.schedules import Simulation
from smp.planning.simulation import Proof, proof_in_words, prove, stages_of


def add_parser(subparsers: Any) -> None:
    """Adds the command ``simulate``. Exit status 2: bad use."""
    parser = subparsers.add_parser(
        "simulate",
        help="the schedule of a configuration as a timeline",
        description="Simulates one step of a model under a configuration: one process, no device, "
        "no weights. Times are estimates from FLOPs and bytes.",
    )
    add_pipeline_run(parser)
    parser.add_argument(
        "--microbatch-ms",
        type=float,
        metavar="T",
        help="measured time of forward and backward of one microbatch of the whole model in one "
        "process; without it that counts as 1000 units",
    )
    parser.set_defaults(execute=guarded("simulate", _run))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.microbatch_ms is not None and not arguments.microbatch_ms > 0:
        raise BadUse(f"--microbatch-ms {arguments.microbatch_ms:g} is no time above 0")
    traced = traced_pipeline(arguments)
    unit = "units" if arguments.microbatch_ms is None else "ms"
    shape = traced.run.layout.shape
    try:
        stages = stages_of(traced.found.decision, traced.run, arguments.microbatch_ms)
        simulation = schedules.simulate(
            stages, shape.microbatches, shape.policy, active_microbatches=shape.active
        )
        proof = prove(simulation, len(stages), shape.microbatches, shape.active)
    except ValueError as error:
        raise BadUse(str(error)) from None
    words = proof_in_words(proof, shape.policy, shape.active)
    title = (
        f"{traced.loaded.trained}: a step of {shape.microbatches} microbatches takes "
        f"{simulation.makespan_ms:.4g} {unit}, and ranks are idle for "
        f"{100 * _bubble(simulation):.1f} % of it (predicted)"
    )
    blocks = [Text(title), *_blocks(simulation, proof, words, unit)]
    if arguments.page is not None:
        write_page(arguments.page, f"Schedule of {traced.loaded.trained}", blocks)
    if arguments.json:
        print_json(_facts(traced, simulation, proof, words, unit))
    else:
        print_blocks(blocks)
    return DONE


def _bubble(simulation: Simulation) -> float:
    total = simulation.makespan_ms * len(simulation.ranks)
    return sum(rank.bubble_ms for rank in simulation.ranks) / total if total else 0.0


def _table(simulation: Simulation) -> Table:
    rows = [
        {
            "pp_rank": pp_rank,
            "busy": f"{rank.busy_ms:.4g}",
            "idle": f"{rank.bubble_ms:.4g}",
            "bubble": f"{100 * rank.bubble_ms / simulation.makespan_ms:.1f} %",
            "most microbatches": rank.peak_activations,
            "activations": bytes_text(rank.peak_activation_bytes),
        }
        for pp_rank, rank in enumerate(simulation.ranks)
    ]
    return Table.of(rows, text_columns=0)


def _order_lines(proof: Proof) -> list[str]:
    lines = []
    for number, (rank, action, waits) in enumerate(proof.order, start=1):
        after = "; ".join(f"{w.action} of rank {w.rank} ({w.why})" for w in waits)
        lines.append(f"{number}. {action} of rank {rank}" + (f": behind {after}" if after else ""))
    return lines


def _blocks(simulation: Simulation, proof: Proof, words: list[str], unit: str) -> list[Block]:
    explanation = Text(
        "F: forward, B: backward, W: gradients of weights; the number is the microbatch, the one "
        "behind a dot the stage of its rank. A box tells its times."
    )
    return [
        timeline(simulation, unit),
        OnPage(explanation.to_html()),
        _table(simulation),
        Listing(simulation.executed.splitlines()),
        Heading("Why it cannot deadlock"),
        *map(Text, words),
        folded("All actions, each behind what it waits for", _order_lines(proof)),
    ]


def _facts(
    traced: Traced, simulation: Simulation, proof: Proof, words: list[str], unit: str
) -> dict[str, Any]:
    return {
        "model": traced.loaded.name,
        "unit": unit,
        "makespan": simulation.makespan_ms,
        "bubble": _bubble(simulation),
        "ranks": [
            {
                "pp_rank": pp_rank,
                "busy": rank.busy_ms,
                "idle": rank.bubble_ms,
                "peak_microbatches": rank.peak_activations,
                "peak_activation_bytes": rank.peak_activation_bytes,
            }
            for pp_rank, rank in enumerate(simulation.ranks)
        ],
        "schedule": simulation.executed.splitlines(),
        "timeline": [
            [entry.rank, entry.stage, entry.action, entry.start_ms, entry.end_ms]
            for entry in simulation.timeline
        ],
        "deadlock": {
            "free": True,
            "actions": len(proof.order),
            "waits": proof.num_waits,
            "proof": words,
        },
    }
