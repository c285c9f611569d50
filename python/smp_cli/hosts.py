"""The hosts of a job, and how a process is started on each."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# As long as keys are in order, ssh asks for nothing; a host that vanishes is noticed after 15 s.
AGENT = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)


@dataclass(frozen=True)
class HostPlan:
    """A host and its ranks, which follow each other."""

    name: str
    """As the agent takes it: perhaps ``user@host``."""
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        """Global ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def address(self) -> str:
        """Without the user."""
        return self.name.rpartition("@")[2]


def plan_hosts(text: str, num_ranks: int) -> list[HostPlan]:
    """The hosts of a job.

    Args:
        text: names, with commas between them, each perhaps with a colon and a number of ranks;
            without numbers each host has the same.
        num_ranks: of the job.

    Raises:
        ValueError: a name comes twice, or the numbers do not fit.
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
                f"--hosts {text!r} has {sum(numbers)} ranks, and -n says {num_ranks}; make them "
                "equal"
            )
    else:
        each, rest = divmod(num_ranks, len(names))
        if rest or not each:
            raise ValueError(
                f"-n {num_ranks} ranks cannot be divided over {len(names)} hosts; give another "
                f"number, or say how many each has: {names[0]}:1,..."
            )
        numbers = [each] * len(names)
    firsts = [sum(numbers[:i]) for i in range(len(numbers))]
    return [HostPlan(*one) for one in zip(names, firsts, numbers, strict=True)]


@dataclass(frozen=True)
class Agent:
    """What starts a command on a host: called with the host and one word, a command of a shell."""

    words: Sequence[str] = tuple(AGENT.split())
    python: str = sys.executable
    """The interpreter on the hosts."""

    def command(self, host: str) -> list[str]:
        """What starts the process of ``smp run`` on a host."""
        path = os.environ.get("PYTHONPATH")
        node = [self.python, "-u", "-m", "smp_cli.node"]
        if path:
            node = ["env", f"PYTHONPATH={path}", *node]
        return [*self.words, host, shlex.join(node)]
