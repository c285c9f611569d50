"""Writes the end of each start of a job to the event file; the ranks write the other events."""

from __future__ import annotations

import runpy
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_cli.output import say

# Importing smp would load torch.
_LINES: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "smp" / "_event_lines.py"))
PATH_VARIABLE: str = _LINES["PATH_VARIABLE"]
MANIFEST_VARIABLE: str = _LINES["MANIFEST_VARIABLE"]


def with_run(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment that names the job, so that all its starts have one name."""
    name = _LINES["RUN_VARIABLE"]
    return {**env, name: env.get(name) or secrets.token_hex(8)}


class JobEvents:
    """The event file of a job, if its environment names one.

    Args:
        env: environment of the ranks, with the name of the job.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._path, self._run = env.get(PATH_VARIABLE), env[_LINES["RUN_VARIABLE"]]

    def ended(
        self,
        attempt: int,
        status: str,
        exit_status: int,
        *,
        rank: int | None = None,
        text: str = "",
        restarts: bool = False,
    ) -> None:
        """Appends the event ``ended``; its fields are those of `smp.world.events.Ended`.

        Args:
            attempt: number of earlier starts.
            status: "finished", "failed" or "preempted".
            exit_status: status with which ``smp run`` ends, if it does not start the ranks again.
            rank: rank that ended the job.
            text: reason in words.
            restarts: whether all ranks are started again.
        """
        if self._path is None:
            return
        values = {"status": status, "exit_status": exit_status, "rank": rank, "text": text}
        try:
            _LINES["append"](
                self._path, "ended", self._run, attempt, {**values, "restarts": restarts}
            )
        except OSError as error:
            say(f"{self._path} was not written: {error.strerror}")
