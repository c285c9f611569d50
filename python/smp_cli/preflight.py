"""``smp run --preflight``: runs ``smp doctor --hosts`` before a job begins."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from smp_cli.environment import Share
from smp_cli.hosts import Agent, HostPlan
from smp_cli.remote import HostError, RemoteRanks

_LIMIT_S = 300.0
_GRACE_S = 15.0  # for the other processes to report, after one has failed
_NUM_LAST = 3


def find_problems(
    hosts: Sequence[HostPlan], agent: Agent, environment: Mapping[str, str]
) -> list[str]:
    """Finds problems of the hosts of a job or between them, each with the name of a host.

    Args:
        hosts: hosts of the job.
        agent: command that starts a process on a host.
        environment: variables of the ranks.
    """
    lines: dict[tuple[int, str], list[str]] = defaultdict(list)

    def keep(rank: int, stream: str, more: list[bytes]) -> None:
        lines[rank, stream] += [line.decode("utf-8", "replace") for line in more]

    # Each host gets one process.
    plans = [HostPlan(host.name, index, 1) for index, host in enumerate(hosts)]
    command = [agent.python, "-m", "smp_cli", "doctor", "--hosts", "--json"]
    share = Share(command, environment, len(plans), len(plans))
    with tempfile.TemporaryDirectory(prefix="smp-preflight-") as folder:
        ranks = RemoteRanks(share, plans, agent, keep, Path(folder))
        try:
            ranks.start(0)
            _watch(ranks)
            ended = dict(ranks.ended)
        except HostError as error:
            return [str(error)]
        finally:
            ranks.end()
    text = "\n".join(lines[0, "out"])
    try:
        sections = json.loads(text[text.index("{") :])
    except ValueError:
        return _silences(plans, ended, lines)
    return [
        problem if name == "pairs of hosts" else f"{name}: {problem}"
        for name, section in sections.items()
        for problem in section["problems"]
    ]


def _watch(ranks: RemoteRanks) -> None:
    """Waits until all processes have ended, or are late."""
    deadline = time.monotonic() + _LIMIT_S
    has_failed = False
    while ranks.running and time.monotonic() < deadline:
        ranks.wait(0.2)
        if not has_failed and any(status for _, status in ranks.ended):
            has_failed, deadline = True, time.monotonic() + _GRACE_S


def _silences(
    plans: Sequence[HostPlan],
    ended: Mapping[int, int],
    lines: Mapping[tuple[int, str], list[str]],
) -> list[str]:
    """Describes how the processes ended, if there is no report."""
    problems = []
    for plan in plans:
        rank = plan.first_rank
        last = "; ".join(line.strip() for line in lines[rank, "err"][-_NUM_LAST:]) or "no word"
        how = f"ended with status {ended[rank]}" if rank in ended else "did not end"
        problems.append(f"host {plan.name}: smp doctor --hosts {how}: {last}")
    return problems
