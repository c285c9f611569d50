"""Makes the environment of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smp_cli.cores import usable_cores

# Other launchers set these; a script that reads them would misunderstand its place in our job.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
)
# These variables belong to a machine or to the terminal on it.
_OF_A_HOST = frozenset(
    "HOME HOSTNAME LOGNAME MAIL OLDPWD PWD SHELL SHLVL TERM TMPDIR USER _ DISPLAY".split()
)
_OF_A_HOST_PREFIXES = ("SSH_", "XDG_", "DBUS_", "LC_TERMINAL", "SMP_RENDEZVOUS")


@dataclass(frozen=True)
class Share:
    """The ranks of a job on one host, whose numbers are consecutive; at first all ranks."""

    command: list[str]
    environment: Mapping[str, str]
    """Variables of all ranks."""
    num_ranks: int
    world_size: int
    first_rank: int = 0
    torch_env: bool = False
    """Set torchrun's variables, too."""
    folder: str = field(default_factory=os.getcwd)
    """Current folder of the ranks."""
    num_spares: int | None = None
    """Processes that wait for the places of ranks; their numbers are behind those of the ranks.
    None: there are none, also later."""

    @property
    def ranks(self) -> range:
        """Returns the numbers of the processes: global ranks, and processes that wait."""
        num_spares = self.num_spares or 0
        return range(self.first_rank, self.first_rank + self.num_ranks + num_spares)

    @property
    def spares(self) -> range:
        """Returns the numbers of the processes that wait."""
        return self.ranks[self.num_ranks :]

    def environment_of(self, rank: int, restart_count: int, meeting: Path) -> dict[str, str]:
        """Returns the environment of one rank.

        Args:
            rank: global rank.
            restart_count: number of earlier starts of all ranks.
            meeting: folder of this start, to which the rank writes why it failed.
        """
        local_rank, local_size = str(rank - self.first_rank), str(self.num_ranks)
        env = {
            # Several ranks that each use all cores are slower than with one thread each.
            "OMP_NUM_THREADS": str(max(1, usable_cores() // self.num_ranks)),
            "PYTHONUNBUFFERED": "1",
            # Asks for all hardware queues of a GPU; see smp.world.nccl.
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            **self.environment,
            "SMP_RANK": str(rank),
            "SMP_WORLD_SIZE": str(self.world_size),
            "SMP_LOCAL_RANK": local_rank,
            "SMP_LOCAL_SIZE": local_size,
            "SMP_RESTART_COUNT": str(restart_count),
            "SMP_FAILURE_FILE": str(failure_file(meeting, rank)),
        }
        if self.num_spares is not None:
            env["SMP_SPARES"] = str(self.num_spares)
        if self.torch_env:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(self.world_size)}
            env |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
        return env


def failure_file(meeting: Path, rank: int) -> Path:
    """Returns the file to which a rank writes why it failed."""
    return meeting / f"failure{rank}.json"


def given_up_file(meeting: Path) -> Path:
    """Returns the file of ranks that go on when others fail: it lists the ranks that were lost."""
    return meeting / "given_up"


def taken_file(meeting: Path) -> Path:
    """Returns the file of processes that have the places of lost ranks."""
    return meeting / "taken"


def stoppable_file(meeting: Path) -> Path:
    """Returns the file of processes in which SIGTERM makes all ranks save and stop."""
    return meeting / "stoppable"


def add_notes(path: Path, numbers: Sequence[int]) -> None:
    """Adds processes to the list of one of these files, as they do themselves on one machine."""
    with path.open("a", encoding="ascii") as file:
        file.write("".join(f"{number}\n" for number in numbers))


def read_notes(path: Path) -> list[int] | None:
    """Returns the processes that one of these files lists; None: there is no such file."""
    try:
        return sorted(map(int, path.read_text().split()))
    except FileNotFoundError:
        return None


def without_foreign(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the launcher's environment without the variables of other launchers."""
    return {name: value for name, value in env.items() if name not in _FOREIGN}


def for_other_hosts(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ranks on other hosts get as well."""
    return {
        name: value
        for name, value in env.items()
        if name not in _OF_A_HOST and not name.startswith(_OF_A_HOST_PREFIXES)
    }


def free_port(address: str = "") -> int:
    """Returns a TCP port that is free at an address of this host; by default at all of them."""
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
