"""``smp estimate``: estimates memory and parameters of each rank, without a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from smp.commands.arguments import add_memory, add_microbatch, add_model, check_counts
from smp.commands.configuration import add_configuration, read_configuration
from smp.commands.ending import DONE, NO, BadUse, DoesNotFit, guarded
from smp.commands.models import LoadedModel, load_model, quiet_transformers
from smp.commands.printing import bytes_text, count_text, print_json
from smp.commands.report import Table, Text, print_blocks
from smp.commands.split_form import split_form
from smp.partition.trace import TraceError
from smp.planning.decided import Run
from smp.planning.estimate import Estimate, estimate
from smp.planning.memory import RankBytes

_KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "buckets",
    "temporary",
    "host",
)


def add_parser(subparsers: Any) -> None:
    """Adds the command ``estimate``. Exit status 1: it does not fit; 2: bad use."""
    text = "memory and parameters of each rank for a configuration, by kind"
    parser = subparsers.add_parser(
        "estimate",
        help=text,
        description="Estimates what each rank of a run holds at its peak with Adam: one process, "
        "no device, no weights. Figures are predictions.",
    )
    add_model(parser)
    add_configuration(parser)
    add_microbatch(parser)
    add_memory(parser, "does it fit?")
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
    check_counts(arguments, "microbatch", "seq")
    configuration = read_configuration(arguments)
    run = Run(
        configuration.config,
        frozenset(configuration.given),
        configuration.num_ranks,
        arguments.checkpoint_layers,
        arguments.memory or 0,
        arguments.device,
    )
    with quiet_transformers():
        loaded = load_model(arguments.model)
        found = traced_estimate(loaded, *loaded.call(arguments.microbatch, arguments.seq), run)
    most = max(stage.held.peak for stage in found.stages)
    fits = arguments.memory is None or most <= arguments.memory
    if arguments.json:
        print_json({**facts(found), "fits": fits if arguments.memory else None})
    else:
        _print(loaded, found)
        if arguments.memory is not None:
            verdict = "fits" if fits else "does not fit"
            print(f"{verdict}: {bytes_text(most)} of {bytes_text(arguments.memory)} per rank")
    return DONE if fits else NO


def traced_estimate(
    loaded: LoadedModel, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run
) -> Estimate:
    """Calls `estimate`, and converts its errors to those of a command.

    Raises:
        BadUse: the model cannot be traced.
        DoesNotFit: the model cannot be partitioned as configured.
    """
    try:
        if run.config.tensor_parallel_degree == 1:
            return estimate(loaded.module, args, kwargs, run)
        with split_form(loaded.module) as form:
            return estimate(loaded.module if form is None else form, args, kwargs, run)
    except TraceError as error:
        raise BadUse(f"model {loaded.name!r} cannot be traced: {error}") from None
    except (ValueError, OSError) as error:
        raise DoesNotFit(str(error)) from None


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
            }
            for stage in found.stages
        ],
    }


def _print(loaded: LoadedModel, found: Estimate) -> None:
    kinds = [kind for kind in _KINDS if any(_of_kind(s.held, kind) for s in found.stages)]
    columns = ["pp_rank", "ranks", "elements", "in flight", *kinds, "peak"]
    rows = [
        [
            str(stage.pp_rank),
            str(stage.num_ranks),
            count_text(stage.elements),
            str(stage.kept_microbatches),
            *(bytes_text(_of_kind(stage.held, kind)) for kind in kinds),
            bytes_text(stage.held.peak),
        ]
        for stage in found.stages
    ]
    title = (
        f"{loaded.trained}, {count_text(found.elements)} parameters: bytes of a rank (predicted)"
    )
    print_blocks([Text(title), Table(columns, rows, text_columns=0)])


def _of_kind(held: RankBytes, kind: str) -> float:
    value: float = getattr(held, kind)
    return value
