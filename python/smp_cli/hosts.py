"""Divides ranks over the hosts of a job, and builds the commands that start their processes."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

# With BatchMode ssh never asks for passwords; a host that vanishes is noticed after 15 s.
AGENT = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)


@dataclass(frozen=True)
class HostPlan:
    """A host with its ranks, whose numbers are consecutive."""

    name: str
    """Name as the agent takes it: perhaps ``user@host``."""
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """Returns the global ranks of the host."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def address(self) -> str:
        """Returns the name without the user."""
        return self.name.rpartition("@")[2]


def plan_hosts(text: str, num_ranks: int) -> list[HostPlan]:
    """Divides the ranks of a job over hosts.

    Args:
        text: names separated by commas, each perhaps with a colon and a number of ranks; without
            numbers each host has the same.
        num_ranks: number of ranks of the job, and of processes that wait.

    Raises:
        ValueError: a name occurs twice, or the numbers do not fit.
    """
    words = [word.strip().partition(":") for word in text.split(",")]
    names, counts = [name for name, _, _ in words], [count for _, _, count in words]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"--hosts {text!r}: expected different names, as host0,host1")
    if any(counts):
        if not all(count.isdecimal() and int(count) > 0 for count in counts):
            raise ValueError(f"--hosts {text!r}: give each host a number of ranks > 0, or none")
        numbers = [int(count) for count in counts]
        if sum(numbers) != num_ranks:
            raise ValueError(
                f"--hosts {text!r} has {sum(numbers)} processes, and -n and --spares say "
                f"{num_ranks}; make them equal"
            )
    else:
        each, rest = divmod(num_ranks, len(names))
        if rest or not each:
            raise ValueError(
                f"{num_ranks} processes (-n and --spares) cannot be divided over {len(names)} "
                f"hosts; give another number, or say how many each has: {names[0]}:1,..."
            )
        numbers = [each] * len(names)
    firsts = [sum(numbers[:i]) for i in range(len(numbers))]
    return [HostPlan(*one) for one in zip(names, firsts, numbers, strict=True)]


def divide_again(
    hosts: Sequence[HostPlan],
    answering: Set[str],
    numbers: Sequence[int],
    leaves_waiting: bool,
) -> tuple[int, list[HostPlan]]:
    """Divides fewer ranks over the hosts that are left, none of which gets more processes.

    Args:
        hosts: division over all hosts.
        answering: names of the hosts that are left.
        numbers: numbers of ranks that the job may have.
        leaves_waiting: whether places that are left over get processes that wait.

    Returns:
        number of ranks, the largest that fits, and the division of all processes.

    Raises:
        ValueError: no number fits.
    """
    left = [host for host in hosts if host.name in answering]
    num_places = sum(host.num_ranks for host in left)
    num_ranks = max((number for number in numbers if number <= num_places), default=0)
    if not num_ranks:
        raise ValueError(
            f"{num_places} places are left on the hosts {sorted(answering)}, and the job has at "
            f"least {min(numbers)} ranks (--fewer-ranks)"
        )
    divided = list[HostPlan]()
    num_left = num_places if leaves_waiting else num_ranks
    for host in left:
        first = divided[-1].ranks.stop if divided else 0
        divided.append(HostPlan(host.name, first, min(host.num_ranks, num_left - first)))
    return num_ranks, [host for host in divided if host.num_ranks]


def own_address(hosts: Sequence[HostPlan]) -> str:
    """Returns the address of this machine by which the hosts reach it.

    Args:
        hosts: hosts of the job.
    """
    address = socket.gethostname()
    for host in hosts:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((host.address, 9))  # sends nothing
            address = probe.getsockname()[0]
            if not address.startswith("127."):
                break
    return address


@dataclass(frozen=True)
class Agent:
    """A command that starts others on a host; it is called with the host and a shell command."""

    words: Sequence[str] = tuple(AGENT.split())
    python: str = sys.executable
    """Path of the interpreter on the hosts."""

    def command(self, host: str) -> list[str]:
        """Returns the command that starts the process of ``smp run`` on a host."""
        path = os.environ.get("PYTHONPATH")
        node = [self.python, "-u", "-m", "smp_cli.node"]
        if path:
            node = ["env", f"PYTHONPATH={path}", *node]
        return [*self.words, host, shlex.join(node)]
