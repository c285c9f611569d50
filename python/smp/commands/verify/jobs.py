"""Runs the user's script as a small job, and returns its records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.commands.verify.layouts import Layout
from smp.commands.verify.records import JobRecords
from smp.observe.verification.order import Order

_TAIL = 30


class ScriptFailed(Exception):
    """The script ended with another status than 0.

    Attributes:
        output: last lines of its output.
    """

    def __init__(self, text: str, output: str) -> None:
        super().__init__(text)
        self.output = output


@dataclass(frozen=True)
class Script:
    """A script with everything that is needed to run it.

    Attributes:
        command: script, or ``-m`` and a module, and its arguments.
        config: keys of the configuration from the command line.
        steps: number of updates of the optimizer.
        folder: folder for the records of all jobs.
        timeout_s: time limit of one job in seconds.
    """

    command: tuple[str, ...]
    config: Mapping[str, Any]
    steps: int
    folder: Path
    timeout_s: float

    def run(
        self, name: str, layout: Layout, replay: JobRecords | None = None, is_exact: bool = False
    ) -> JobRecords:
        """Runs the script in a layout.

        Args:
            name: name of the job, for its folder.
            layout: degrees of parallelism.
            replay: records whose inputs this one process computes with, or None.
            is_exact: compute in float64.

        Raises:
            ScriptFailed: it failed, took too long or made no update.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        source = None if replay is None else str(replay.folder)
        order = Order(str(folder), self.steps, is_exact, source)
        order.write(folder / "order.json")
        ranks = layout.num_processes
        command = [sys.executable, "-m", "smp_cli", "run", "-n", str(ranks)]
        command += ["-m", "smp.observe.verification.seeded", *self.command]
        log = folder / "output.txt"
        with open(log, "wb") as output:
            try:
                status = subprocess.run(
                    command,
                    env=self._environment(layout, folder / "order.json", is_exact),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    timeout=self.timeout_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        lines, reason = log.read_text(errors="replace").splitlines(), None
        records = JobRecords(folder)
        if status is None:
            reason = f"it has not made {self.steps} updates after {self.timeout_s:g} s "
            reason += "(--timeout-s gives it more)"
        elif status != 0:
            reason = _error(lines) or f"it ended with status {status}"
        elif len(records.facts) < ranks or records.num_updates == 0:
            reason = "it ended without an update of an smp.DistributedOptimizer after a step "
            reason += "function"
        if reason is not None:
            raise ScriptFailed(reason, "\n".join(lines[-_TAIL:]))
        return records

    def _environment(self, layout: Layout, order: Path, is_exact: bool) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k != "SMP_FAULT"}
        given: dict[str, Any] = dict(self.config)
        env["SM_HP_MP_PARAMETERS"] = json.dumps(layout.configuration(given, is_exact))
        env["SMP_VERIFY"] = str(order)
        env["SMP_DEVICE"] = "cpu"
        env["SMP_CHECK_FIRST_STEP"] = "0"  # every step is compared here
        env.setdefault("SMP_TIMEOUT_S", str(max(1.0, self.timeout_s)))
        env.setdefault("PYTHONHASHSEED", "0")
        return env


def _error(lines: Sequence[str]) -> str | None:
    """Returns the line of the first exception that is not a consequence of other ranks' errors."""
    raised = re.compile(r"^(?:\[\d+\] )?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b.*)")
    found = [match[1] for line in lines if (match := raised.match(line))]
    own = [line for line in found if "PeerFailure" not in line]
    return (own or found or [None])[0]
