"""Defines options that several commands about a model share."""

from __future__ import annotations

import argparse

from smp.commands.ending import BadUse
from smp.commands.printing import parse_bytes


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds ``MODEL``, ``--seq`` and ``--json``."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder or name of Hugging Face, or module:function"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument("--json", action="store_true", help="for programs")


def add_microbatch(parser: argparse.ArgumentParser) -> None:
    """Adds ``--microbatch``."""
    parser.add_argument(
        "--microbatch",
        type=int,
        default=1,
        metavar="N",
        help="samples of a microbatch that a rank reads; default: 1",
    )


def add_memory(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds ``--memory``.

    Args:
        meaning: words for the command's use of it.
    """
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="SIZE", help=f"of a device (80GiB): {meaning}"
    )


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Checks that counts are at least 1 if they are given.

    Args:
        arguments: parsed arguments.
        names: names of options, without the two dashes.

    Raises:
        BadUse: a count is below 1.
    """
    for name in names:
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None and value < 1:
            raise BadUse(f"--{name} must be at least 1, got {value}")
