"""Knows which ranks share a folder of checkpoints. Imports no torch.

With `SMP_STORE_PER_HOST` each host has a folder of its own: its first rank begins, commits and
holds checkpoints there, as the first rank of a job does in a shared folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """The ranks that share a folder.

    Attributes:
        rank: global rank of this process.
        ranks: global ranks that share its folder.
        leaders: first rank of each folder.
    """

    rank: int
    ranks: tuple[int, ...]
    leaders: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, num_ranks: int, hosts: Sequence[str] | None) -> Node:
        """Returns the node of a rank.

        Args:
            rank: global rank.
            num_ranks: number of ranks.
            hosts: host of each rank, if each host has a folder of its own; None: there is one.
        """
        hosts = hosts or ("",) * num_ranks
        ranks = tuple(number for number, host in enumerate(hosts) if host == hosts[rank])
        leaders = tuple(number for number, host in enumerate(hosts) if hosts.index(host) == number)
        return cls(rank, ranks, leaders)

    @property
    def leader(self) -> int:
        """First of the ranks that share the folder."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        """True on that rank."""
        return self.rank == self.leader

    @property
    def is_alone(self) -> bool:
        """True if all ranks share the folder."""
        return len(self.leaders) == 1
