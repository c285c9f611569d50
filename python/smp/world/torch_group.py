"""Reads the default group of `torch.distributed`, if it was made before `smp.init`.

Engines such as Ray Train make it, and so do scripts that start their processes themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch.distributed as dist

from smp.world.launch import Launch, Rendezvous, TorchGroup, restart_count


def read_torch_group(env: Mapping[str, str]) -> TorchGroup | None:
    """Returns the default group of this process; None: there is none. Not collective.

    Args:
        env: environment variables, for the number of starts before this one.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    store = innermost_store()
    place = place_of(store, restart_count(env))
    return TorchGroup(dist.get_rank(), dist.get_world_size(), place, type(store).__name__)


def innermost_store() -> dist.Store:
    """Returns the store in which processes of the default group have met, without prefixes."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def place_of(store: dist.Store, attempt: str) -> Rendezvous | None:
    """Returns the place where other processes reach a store; None: they cannot.

    Args:
        store: store without prefixes.
        attempt: result of `restart_count`.
    """
    if isinstance(store, dist.TCPStore):
        return Rendezvous("tcp", host=store.host, port=store.port, has_server=True, attempt=attempt)
    if isinstance(store, dist.FileStore):
        path: str = store.path  # type: ignore[attr-defined]  # its stub lacks it
        return Rendezvous("file", path=path, attempt=attempt)
    return None


def refuse_lonely_worker(launch: Launch) -> None:
    """Refuses one of several workers of Ray Train that would each train alone.

    `DataParallelTrainer` sets no variables and makes no group, so its workers look like single
    processes.

    Raises:
        ValueError: this process is such a worker.
    """
    train = sys.modules.get("ray.train")
    if train is None or launch.launcher != "single":
        return
    context = train.get_context()
    try:
        rank, size = context.get_world_rank(), context.get_world_size()
    except RuntimeError:  # not in a worker
        return
    if size > 1:
        raise ValueError(
            f"smp launch: this is worker {rank} of {size} of Ray Train, and there is neither a "
            "group of torch.distributed nor variables RANK and WORLD_SIZE, so that it would train "
            "alone; use ray.train.torch.TorchTrainer, or pass TorchConfig() as backend_config"
        )
