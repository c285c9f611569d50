"""What ranks find in their environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smp_cli.cores import usable_cores

# Set by other launchers; a script that reads them would take our ranks for theirs.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
)
# What belongs to a machine or to the terminal on it.
_OF_A_HOST = frozenset(
    "HOME HOSTNAME LOGNAME MAIL OLDPWD PWD SHELL SHLVL TERM TMPDIR USER _ DISPLAY".split()
)
_OF_A_HOST_PREFIXES = ("SSH_", "XDG_", "DBUS_", "LC_TERMINAL", "SMP_RENDEZVOUS")


@dataclass(frozen=True)
class Place:
    """A rank among all and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def without_foreign(env: Mapping[str, str]) -> dict[str, str]:
    """What the launcher was given, without the variables of other launchers."""
    return {name: value for name, value in env.items() if name not in _FOREIGN}


def for_other_hosts(env: Mapping[str, str]) -> dict[str, str]:
    """What ranks on other hosts are to find as well."""
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
    """Environment of one rank.

    Args:
        base: what all ranks have.
        place: of the rank.
        restart_count: how often all ranks have been started before.
        failure_file: where the rank says why it failed.
        torch_env: set torchrun's variables, too.
        more: where the ranks meet; what `base` has of it stays.
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
