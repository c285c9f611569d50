"""Decides the partition of a model for a command, without a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.commands.arguments import add_memory, add_microbatch, add_model, check_counts
from smp.commands.configuration import add_configuration, read_configuration
from smp.commands.ending import BadUse
from smp.commands.estimate import traced_estimate
from smp.commands.models import LoadedModel, load_model, quiet_transformers
from smp.config.schema import Config
from smp.partition.costs import Trace
from smp.partition.decision import Decision
from smp.planning.decided import Run


@dataclass(frozen=True)
class Decided:
    """A model, its configuration, its partition, and the costs that decided it."""

    loaded: LoadedModel
    config: Config
    decision: Decision
    costs: Trace


def add_arguments(parser: Any) -> None:
    """Adds the arguments of `decide`, ``--json`` and ``--page``."""
    add_model(parser)
    add_configuration(parser)
    add_microbatch(parser)
    add_memory(parser, "a limit")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write a page (HTML)")


def decide(arguments: argparse.Namespace) -> Decided:
    """Returns the partition that the run would have.

    Raises:
        BadUse: the arguments are wrong, or the model cannot be traced.
        DoesNotFit: the model cannot be partitioned as configured.
    """
    check_counts(arguments, "microbatch", "seq")
    configuration = read_configuration(arguments)
    config = configuration.config
    if config.pipeline_parallel_degree == 1:
        raise BadUse(
            "there is one partition, and nothing to decide; give pipeline_parallel_degree, for "
            "example --config pipeline_parallel_degree=2,microbatches=8"
        )
    run = Run(
        config,
        frozenset(configuration.given),
        configuration.num_ranks,
        room_bytes=arguments.memory or 0,
    )
    with quiet_transformers():
        loaded = load_model(arguments.model)
        call = loaded.call(arguments.microbatch, arguments.seq)
        found = traced_estimate(loaded, *call, run)
    return Decided(loaded, config, found.decision, found.costs)
