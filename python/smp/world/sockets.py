"""Opens the TCP connections of a process and exchanges the addresses of all ranks."""

from __future__ import annotations

import os
import time

import torch.distributed as dist

import smp._C as _C

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25


def open_sockets(
    store: dist.Store,
    global_rank: int,
    world_size: int,
    *,
    loopback: bool,
    towards: str,
    secret: bytes,
    board: _C.FaultBoard,
    timeout_s: float,
) -> _C.PeerSockets:
    """Makes the connections of this process, which open on first use. Collective.

    Rank 0 collects the addresses of all ranks, so that each rank asks the store a few times and not
    once for each pair.

    Args:
        store: keys of this init.
        global_rank: global rank of this process.
        world_size: number of all ranks.
        loopback: whether all ranks are on one machine; then nothing listens elsewhere.
        towards: a host that all ranks reach.
        secret: secret of this job; both sides of a connection prove that they know it.
        board: ends the wait when a rank has failed.
        timeout_s: time-out for all ranks to arrive, in seconds.

    Raises:
        PeerFailure: a rank has failed.
        RuntimeError: ranks did not come in time, or this host has no address for others.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = "127.0.0.1" if loopback else _C.own_address(interface, towards)
    sockets = _C.PeerSockets(global_rank, address=address, secret=secret, world_size=world_size)
    store.set(f"socket/{global_rank}", sockets.address)
    deadline_s = time.monotonic() + timeout_s
    if global_rank == 0:
        keys = [f"socket/{rank}" for rank in range(world_size)]
        _wait_for(store, keys, board, deadline_s)
        store.set("sockets", "\n".join(text.decode() for text in store.multi_get(keys)))
    _wait_for(store, ["sockets"], board, deadline_s)
    sockets.set_addresses(store.get("sockets").decode().split("\n"))
    return sockets


def _wait_for(store: dist.Store, keys: list[str], board: _C.FaultBoard, deadline_s: float) -> None:
    pause_s = _SHORTEST_PAUSE_S
    while not store.check(keys):  # a wait of the store notices no fault
        board.raise_if_faulted()
        if time.monotonic() > deadline_s:
            missing = [key for key in keys if not store.check([key])]
            raise RuntimeError(
                f"{_C.rank_prefix()}smp.init: nobody has said where to connect to, for {missing}; "
                "raise SMP_TIMEOUT_S if ranks are that slow"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
