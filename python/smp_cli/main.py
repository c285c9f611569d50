"""Finds the subcommand and runs it; modules of other subcommands are not imported."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """A subcommand.

    `module` has ``add_parser(subparsers)``: it adds a parser of this name, whose default
    ``execute`` takes the parsed arguments and returns the exit status. The module is imported only
    for its own subcommand, so it may need torch.
    """

    name: str
    help: str
    module: str


COMMANDS: tuple[Command, ...] = (
    Command("run", "start a script in several processes of this machine", "smp_cli.run"),
    Command("store", "where the ranks of jobs meet that go on without lost ones", "smp_cli.store"),
    Command("doctor", "versions, devices, pairs of ranks, and what is wrong", "smp_cli.doctor"),
    Command(
        "verify",
        "compare a training script in small layouts with one process",
        "smp.commands.verify",
    ),
    Command(
        "config", "the keys of the configuration, and a check of a file", "smp.commands.config"
    ),
    Command("ckpt", "look at checkpoints, check and convert them", "smp.checkpoint.cli"),
    Command(
        "explain",
        "why a partition is as it is, and what another would cost",
        "smp.commands.explain",
    ),
    Command("simulate", "the schedule of a configuration as a timeline", "smp.commands.simulate"),
    Command("estimate", "memory of each rank for a configuration", "smp.commands.estimate"),
    Command("plan", "the fastest layouts of a model on so many devices", "smp.commands.plan"),
)


def build_parser(
    wanted: str | None, commands: Sequence[Command] = COMMANDS
) -> argparse.ArgumentParser:
    """Returns a parser with the subcommand `wanted`, and only the names of the others."""
    parser = argparse.ArgumentParser(prog="smp", description="Model-parallel training for PyTorch.")
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.set_defaults(execute=lambda arguments: _without_command(parser, arguments))
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in commands:
        if command.name == wanted:
            importlib.import_module(command.module).add_parser(subparsers)
        else:
            subparsers.add_parser(command.name, help=command.help)
    return parser


def _without_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.version:
        # Importing smp would load torch.
        version = runpy.run_path(str(Path(__file__).parents[1] / "smp" / "_version.py"))
        print(f"smp {version['__version__']}")
    else:
        parser.print_help()
    return 0


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Runs the command.

    Args:
        argv: arguments without the name of the program; by default those of the process.
        commands: all subcommands.

    Returns:
        the exit status.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    arguments = build_parser(wanted, commands).parse_args(argv)
    status: int = arguments.execute(arguments)
    return status
