"""Divides the words of the command line between `smp verify` and the script."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from smp_cli.sagemaker import CONFIG_FORM

from smp.commands.ending import BadUse
from smp.commands.verify.layouts import ALL

SEPARATOR = "--"
"""Everything after this separator is passed to the script."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are allowed in front of the script's name and behind it."""
    add = parser.add_argument
    add("--layouts", default="pp2,dp2", help=f"all ({','.join(ALL)}) or some (pp2,dp2)")
    add("--steps", type=int, default=3, metavar="N", help="updates of the optimizer (3)")
    add("--config", metavar=CONFIG_FORM, help="configuration, as smp run takes it")
    add("--timeout-s", type=float, default=600.0, metavar="S", help="of each run (600)")
    add("--keep", type=Path, metavar="DIR", help="keep records and output of all runs there")
    add("--json", action="store_true", help="one JSON document instead of a table")


@dataclass(frozen=True)
class Divided:
    """The words behind the script's name.

    Attributes:
        options: values of the options of `smp verify` among them, by attribute.
        script: arguments of the script.
    """

    options: dict[str, Any]
    script: tuple[str, ...]

    def told(self, script: str) -> str:
        """Returns which options were taken, for scripts that have options of the same names."""
        flags = [_flag(name) for name in self.options]
        return (
            f"{' and '.join(flags)} behind {script!r}: taken by smp verify; options of the script "
            f"go behind '{SEPARATOR}' ({script} ... {SEPARATOR} {flags[0]} ...)"
        )


def divide(words: Sequence[str], before: argparse.Namespace) -> Divided:
    """Divides the words behind the script's name.

    Without a separator, options of `smp verify` are taken wherever they are, and all other words
    are arguments of the script. With a separator, arguments of the script have to be behind it.

    Args:
        words: words behind the script's name.
        before: parsed arguments in front of it.

    Raises:
        BadUse: an option has no value, or a value of the wrong kind, or is in front of the script's
            name as well; or a word in front of the separator is not an option.
    """
    parser = _Options(add_help=False, allow_abbrev=False)
    add_options(parser)
    defaults = {action.dest: action.default for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    has_separator = SEPARATOR in words
    end = list(words).index(SEPARATOR) if has_separator else len(words)
    found, others = parser.parse_known_args(list(words[:end]))
    if has_separator and others:
        raise BadUse(
            f"{others[0]!r} between the script and '{SEPARATOR}' is no option of smp verify; "
            f"arguments of the script go behind '{SEPARATOR}'"
        )
    for name in vars(found):
        if getattr(before, name) != defaults[name]:
            raise BadUse(
                f"{_flag(name)} is in front of the script's name and behind it; give it once, and "
                f"if the second is for the script, behind '{SEPARATOR}'"
            )
    return Divided(vars(found), (*others, *words[end + 1 :]))


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadUse(
            f"behind the script's name: {message}; what is for the script goes behind '{SEPARATOR}'"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
