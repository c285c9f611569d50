"""Ends commands with an exit status, and one line for a mistake."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

DONE = 0
NO = 1
"""The answer is no: it does not fit, it is not equal."""
BAD_USE = 2


class BadUse(Exception):
    """The command cannot begin; the text names what was expected, what came and what to do."""


class DoesNotFit(Exception):
    """The answer is no, and the reason is all that is shown."""


def guarded(
    name: str, run: Callable[[argparse.Namespace], int]
) -> Callable[[argparse.Namespace], int]:
    """Wraps `run`: `BadUse` and `DoesNotFit` become a line on the standard error and a status.

    Args:
        name: name of the command, for the line.
        run: function that takes the parsed arguments and returns the exit status.
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
