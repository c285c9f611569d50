"""How a command ends: its exit status, and one line for what was wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

DONE = 0
NO = 1
"""The answer is no: it does not fit, it is not equal."""
BAD_USE = 2


class BadUse(Exception):
    """The command cannot begin: the text says what was expected, what came and what to do."""


class DoesNotFit(Exception):
    """The answer is no, and there is nothing to show but the reason."""


def guarded(
    name: str, run: Callable[[argparse.Namespace], int]
) -> Callable[[argparse.Namespace], int]:
    """`run` whose `BadUse` and `DoesNotFit` become one line on the standard error and a status.

    Args:
        name: of the command, for the line.
        run: takes the parsed arguments and returns the exit status.
    """

    def execute(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except BadUse as error:
            print(f"smp {name}: {error}", file=sys.stderr)
            return BAD_USE
        except DoesNotFit as error:
            print(f"smp {name}: {error}", file=sys.stderr)
            return NO

    return execute
