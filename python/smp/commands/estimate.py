"""``smp estimate``: estimates memory and parameters of each rank, without a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

from smp.commands.arguments import Traced, add_hardware, add_run, traced_run
from smp.commands.ending import DONE, NO, guarded
from smp.commands.printing import bytes_text, count_text, print_json
from smp.commands.report import Table, Text, print_blocks
from smp.planning.estimate import Estimate
from smp.planning.memory import RankBytes


def add_parser(subparsers: Any) -> None:
    """Adds the command ``estimate``. Exit status 1: it does not fit; 2: bad use."""
    parser = subparsers.add_parser(
        "estimate",
        help="memory and parameters of each rank for a configuration, by kind",
        description="Estimates what each rank of a run holds at its peak with Adam: one process, "
        "no device, no weights. Figures are predictions.",
    )
    add_run(parser, "does it fit?")
    add_hardware(parser, None)
    parser.add_argument(
        "--checkpoint-layers",
        action="store_true",
        help="activation checkpointing of each layer of the model's lists",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="sizes of buckets; default: cpu"
    )
    parser.set_defaults(execute=guarded("estimate", _run))


def _run(arguments: argparse.Namespace) -> int:
    traced = traced_run(arguments, checkpoints=arguments.checkpoint_layers, device=arguments.device)
    stages = [
        (stage.held.peak, room)
        for stage in traced.found.stages
        if (room := stage.room or arguments.memory) is not None
    ]
    most, room = max(stages, key=lambda own: own[0] / own[1], default=(0, None))
    fits = room is None or most <= room
    if arguments.json:
        print_json({**facts(traced.found), "fits": None if room is None else fits})
    else:
        print_blocks(_blocks(traced))
        if room is not None:
            verdict = "fits" if fits else "does not fit"
            where = "per rank" if arguments.hardware is None else "on the fullest rank"
            print(f"{verdict}: {bytes_text(most)} of {bytes_text(room)} {where}")
        if traced.run.config.device_speeds is not None:
            print(f"device_speeds: {list(traced.run.config.device_speeds)}")
    return DONE if fits else NO


def facts(found: Estimate) -> dict[str, Any]:
    """Returns an estimate for programs, in bytes and elements."""
    return {
        "parameters": found.elements,
        "ranks": [
            {
                "pp_rank": stage.pp_rank,
                "num_ranks": stage.num_ranks,
                "parameters": stage.elements,
                "kept_microbatches": stage.kept_microbatches,
                "microbatch_bytes": round(stage.microbatch_bytes),
                "bytes": {kind: round(n) for kind, n in asdict(stage.held).items()},
                "peak_bytes": round(stage.held.peak),
                "room_bytes": stage.room,
            }
            for stage in found.stages
        ],
    }


def _blocks(traced: Traced) -> list[Text | Table]:
    found = traced.found
    kinds = [
        f.name for f in fields(RankBytes) if any(getattr(s.held, f.name) for s in found.stages)
    ]
    rows = [
        {
            "pp_rank": stage.pp_rank,
            "ranks": stage.num_ranks,
            "elements": count_text(stage.elements),
            "in flight": stage.kept_microbatches,
            **{kind: bytes_text(getattr(stage.held, kind)) for kind in kinds},
            "peak": bytes_text(stage.held.peak),
            **({} if stage.room is None else {"of": bytes_text(stage.room)}),
        }
        for stage in found.stages
    ]
    title = (
        f"{traced.loaded.trained}, {count_text(found.elements)} parameters: bytes of a rank "
        "(predicted)"
    )
    return [Text(title), Table.of(rows, text_columns=0)]
