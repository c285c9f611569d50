"""Makes the environment of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
class Place:
    """The place of a rank among all ranks and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


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


def rank_environment(
    base: Mapping[str, str],
    place: Place,
    *,
    restart_count: int,
    failure_file: str,
    torch_env: bool,
    **more: str,
) -> dict[str, str]:
    """Returns the environment of one rank.

    Args:
        base: variables of all ranks.
        place: place of the rank.
        restart_count: number of earlier starts of all ranks.
        failure_file: path to which the rank writes why it failed.
        torch_env: set torchrun's variables, too.
        more: address at which the ranks meet; variables in `base` take precedence.
    """
    env = {
        **base,
        "SMP_RANK": str(place.rank),
        "SMP_WORLD_SIZE": str(place.size),
        "SMP_LOCAL_RANK": str(place.local_rank),
        "SMP_LOCAL_SIZE": str(place.local_size),
        "SMP_RESTART_COUNT": str(restart_count),
        "SMP_FAILURE_FILE": failure_file,
    }
    # Several ranks that each use all cores are slower than with one thread each.
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // place.local_size)))
    env.setdefault("PYTHONUNBUFFERED", "1")
    for name, value in more.items():
        env.setdefault(name, value)
    if torch_env:
        env |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
        env |= {"LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.local_size)}
    return env
