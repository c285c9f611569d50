"""``smp run --preflight``: runs ``smp doctor --hosts`` before a job begins."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smp_cli.hosts import Agent, HostPlan
from smp_cli.output import Output, Writers
from smp_cli.remote import HostError, RemoteJob, RemoteRanks

_LIMIT_S = 300.0
_GRACE_S = 15.0  # for the other processes to report, after one has failed
_NUM_LAST = 3


@dataclass(frozen=True)
class _Kept(Output):
    """Keeps the lines of ranks in memory."""

    out: dict[int, list[str]] = field(default_factory=dict)
    err: dict[int, list[str]] = field(default_factory=dict)

    def open(self, rank: int, is_first: bool) -> Writers:
        out, err = self.out.setdefault(rank, []), self.err.setdefault(rank, [])

        def keep(to: list[str], lines: list[bytes]) -> None:
            to.extend(line.decode("utf-8", "replace") for line in lines)

        return Writers(lambda lines: keep(out, lines), lambda lines: keep(err, lines))


def find_problems(
    hosts: Sequence[HostPlan], agent: Agent, environment: Mapping[str, str]
) -> list[str]:
    """Finds problems of the hosts of a job or between them, each with the name of a host.

    Args:
        hosts: hosts of the job.
        agent: command that starts a process on a host.
        environment: variables of the ranks.
    """
    output = _Kept()
    # Each host gets one process.
    plans = [HostPlan(host.name, index, 1) for index, host in enumerate(hosts)]
    command = [agent.python, "-m", "smp_cli", "doctor", "--hosts", "--json"]
    job = RemoteJob(command, plans, agent, environment)
    with tempfile.TemporaryDirectory(prefix="smp-preflight-") as folder:
        ranks = RemoteRanks(job, output, True, Path(folder))
        try:
            ranks.start(0)
            _watch(ranks)
        except HostError as error:
            return [str(error)]
        finally:
            ranks.kill()
            ranks.close()
    sections = _sections(output.out[0])
    if sections is None:
        return _silences(hosts, dict(ranks.ended), output)
    return [
        problem if name == "pairs of hosts" else f"{name}: {problem}"
        for name, section in sections.items()
        for problem in section["problems"]
    ]


def _watch(ranks: RemoteRanks) -> None:
    """Waits until all processes have ended, and kills those that are late."""
    deadline = time.monotonic() + _LIMIT_S
    has_failed = False
    while ranks.running and time.monotonic() < deadline:
        ranks.wait(0.2)
        if not has_failed and any(status for _, status in ranks.ended):
            has_failed, deadline = True, time.monotonic() + _GRACE_S
    ranks.send(signal.SIGKILL)


def _sections(lines: Sequence[str]) -> dict[str, dict[str, list[str]]] | None:
    text = "\n".join(lines)
    try:
        found: dict[str, dict[str, list[str]]] = json.loads(text[text.index("{") :])
    except ValueError:
        return None
    return found


def _silences(hosts: Sequence[HostPlan], ended: Mapping[int, int], output: _Kept) -> list[str]:
    """Describes how the processes ended, if there is no report."""
    problems = []
    for rank, host in enumerate(hosts):
        last = "; ".join(line.strip() for line in output.err[rank][-_NUM_LAST:]) or "no word"
        how = f"ended with status {ended[rank]}" if rank in ended else "did not end"
        problems.append(f"host {host.name}: smp doctor --hosts {how}: {last}")
    return problems
