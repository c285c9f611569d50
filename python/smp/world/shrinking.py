"""Decides which ranks go on after others were lost, and where that is not possible."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import torch.distributed as dist

import smp._C as _C
from smp._device import is_accelerator
from smp._torch_releases import has_store_clones
from smp.config.schema import config_error
from smp.world.launch import Launch, Rendezvous


def lasting_ranks(grid: _C.ProcessGrid, lost: Collection[int]) -> list[int]:
    """Returns the ranks that go on: those of the replicas of which no rank is lost.

    They keep their places inside of a replica, and the order of the replicas.

    Args:
        grid: grid of all ranks.
        lost: global ranks that are lost.

    Returns:
        present global ranks, index = global rank from now on; empty: no replica is whole.
    """
    return list(_lasting_ranks(grid, frozenset(lost)))


def places_with_replicas(grid: _C.ProcessGrid, num_replicas: int) -> list[int]:
    """Returns the places of ranks when replicas are added to theirs.

    Ranks keep their places inside of a replica, and the order of the replicas; new ones are behind.

    Args:
        grid: grid of the present ranks.
        num_replicas: number of replicas from now on.

    Returns:
        present global ranks, index = global rank from now on; -1: the place is open.
    """
    larger = _with_replicas(grid, num_replicas)
    at = {_place(grid, rank): rank for rank in range(grid.world_size)}
    return [at.get(_place(larger, rank), -1) for rank in range(larger.world_size)]


def _with_replicas(grid: _C.ProcessGrid, num_replicas: int) -> _C.ProcessGrid:
    return _C.ProcessGrid(
        grid.world_size // grid.group_size("rdp") * num_replicas,
        grid.group_size("pp"),
        grid.group_size("tp"),
        grid.group_size("cp"),
        grid.placement,
    )


def _place(grid: _C.ProcessGrid, rank: int) -> tuple[int, int, int, int]:
    at = grid.coordinates(rank)
    return at.pp, at.tp, at.cp, at.rdp


@lru_cache(maxsize=64)
def _lasting_ranks(grid: _C.ProcessGrid, lost: frozenset[int]) -> tuple[int, ...]:
    broken = {grid.coordinates(rank).rdp for rank in lost}
    kept = [rdp for rdp in range(grid.group_size("rdp")) if rdp not in broken]
    if not kept:
        return ()
    smaller = _with_replicas(grid, len(kept))
    at = {_place(grid, rank): rank for rank in range(grid.world_size)}
    places = [smaller.coordinates(rank) for rank in range(smaller.world_size)]
    return tuple(at[place.pp, place.tp, place.cp, kept[place.rdp]] for place in places)


def have_all_parts(
    grid: _C.ProcessGrid, lost: Collection[int], keepers: Sequence[int] = ()
) -> bool:
    """Returns whether the ranks that are left have all parts of a replica, even of several ones.

    Args:
        grid: grid of all ranks.
        lost: global ranks that are lost.
        keepers: rank with a copy of each rank's state, index = global rank; empty: there are none.
    """
    if keepers:
        return not any(keepers[rank] in lost for rank in lost)
    return not any(set(peers) <= set(lost) for peers in grid.groups("rdp"))


def choose_keepers(hosts: Sequence[str]) -> list[int]:
    """Returns the rank that keeps a copy of each rank's state, index = global rank.

    Each rank keeps one copy, on another host than the rank's for as many ranks as possible.

    Args:
        hosts: host of each rank, of which there are several.
    """
    size = len(hosts)

    def num_together(shift: int) -> int:
        return sum(hosts[rank] == hosts[(rank + shift) % size] for rank in range(size))

    shift = min(range(1, size), key=num_together)
    return [(rank + shift) % size for rank in range(size)]


def fill_places(
    lost: Collection[int], taken: Mapping[int, int], free: Collection[int]
) -> dict[int, int]:
    """Returns the process that takes the place of each lost rank.

    Args:
        lost: global ranks that are lost.
        taken: numbers of processes that have taken such places already, which they keep.
        free: numbers of processes that wait.

    Returns:
        number of a process by rank; empty: there are too few.
    """
    open_places = sorted(set(lost) - set(taken))
    waiting = sorted(set(free) - set(taken.values()))
    if len(waiting) < len(open_places):
        return {}
    return {**taken, **dict(zip(open_places, waiting, strict=False))}


def refuse_shrinking(
    on_failure: str,
    launch: Launch,
    place: Rendezvous,
    env: Mapping[str, str],
    device_type: str,
    transport: str,
) -> None:
    """Refuses ``on_failure`` where ranks cannot go on when others are lost.

    Args:
        on_failure: value of the configuration.
        launch: launch of this process.
        place: place where the ranks meet.
        env: environment variables.
        device_type: type of the devices of this process.
        transport: "gloo", "tcp" or "mpi".

    Raises:
        ValueError: names the obstacle.
    """
    is_torchrun = "TORCHELASTIC_RUN_ID" in env
    obstacles = {
        "torchrun ends all ranks of a host when one fails, and there is only one; start them with "
        "smp run": is_torchrun and env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"),
        "torchrun starts the ranks of a host again, which the others do not wait for; leave out "
        "--max-restarts, and start torchrun again on that host": (
            is_torchrun and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        ),
        "smp.launch ends all ranks when one fails; start them with smp run": (
            "SMP_LAUNCHED" in env
        ),
        "mpirun ends all ranks when one fails; start them with smp run": launch.launcher == "mpi",
        "messages go over MPI, which ends with any of its ranks; leave SMP_TRANSPORT out": (
            transport == "mpi"
        ),
        "the ranks meet in a store of rank 0, which may die; let them meet in a file that all "
        "see (SMP_RENDEZVOUS=file:///path), as smp run does on one machine, or in a store of its "
        "own (smp store)": (place.kind == "tcp" and not place.has_server),
        "PyTorch has no Store.clone yet, so threads would wait for each other's requests to a "
        "store at a port; let the ranks meet in a file (SMP_RENDEZVOUS=file:///path)": (
            place.kind == "tcp" and not has_store_clones()
        ),
        f"it is supported on the CPU, and the device is {device_type}; set SMP_DEVICE=cpu": (
            is_accelerator(device_type)
        ),
        "the script has initialized torch.distributed, whose group cannot lose ranks; leave that "
        "to smp.init": dist.is_available() and dist.is_initialized(),
        "no process waits for the place of a lost rank, or comes later; start the job with smp run "
        "--spares N or --max-replacements N, or set SMP_SPARES=0 if your launcher replaces them": (
            on_failure == "spare" and launch.spares is None
        ),
    }
    for words, is_so in obstacles.items():
        if is_so:
            reason, _, fix = words.partition("; ")
            fix += ', or set on_failure="end"'
            raise config_error("on_failure", on_failure, reason, fix)
