"""The partition of a model that a command names, decided without a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.commands.configuration import add_configuration, read_configuration
from smp.commands.ending import BadUse
from smp.commands.estimate import traced_estimate
from smp.commands.models import LoadedModel, load_model, quiet_transformers
from smp.commands.printing import parse_bytes
from smp.config.schema import Config
from smp.partition.decision import Decision
from smp.planning.estimate import Run


@dataclass(frozen=True)
class Decided:
    """A model, its configuration, and where its modules are."""

    loaded: LoadedModel
    config: Config
    decision: Decision


def add_arguments(parser: Any) -> None:
    """Adds what `decide` reads, ``--page`` and ``--json``."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder or name of Hugging Face, or module:function"
    )
    add_configuration(parser)
    parser.add_argument(
        "--microbatch", type=int, default=1, metavar="N", help="samples of a microbatch (1)"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help="of a device (80GiB): a limit"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write a page (HTML)")
    parser.add_argument("--json", action="store_true", help="for programs")


def decide(arguments: argparse.Namespace) -> Decided:
    """The partition that the run would have.

    Raises:
        BadUse, DoesNotFit: there is none.
    """
    if arguments.microbatch < 1 or (arguments.seq is not None and arguments.seq < 1):
        raise BadUse("--microbatch and --seq must be at least 1")
    configuration = read_configuration(arguments)
    config = configuration.config
    if config.pipeline_parallel_degree == 1:
        raise BadUse(
            "there is one partition, and nothing to decide; give pipeline_parallel_degree, for "
            "example --config pipeline_parallel_degree=2 microbatches=8"
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
    return Decided(loaded, config, found.decision)


def write_page(path: Path, text: str) -> None:
    """Writes a page.

    Raises:
        BadUse: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadUse(f"cannot write {str(path)!r}: {error.strerror}") from None
