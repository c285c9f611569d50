"""The command ``smp``: starts jobs and looks at machines.

A package beside `smp`, because importing `smp` loads torch: help appears at once, and the process
that watches the ranks of a job takes no memory from them. ``python -m smp`` is the same command.
"""

from smp_cli.main import main

__all__ = ["main"]
