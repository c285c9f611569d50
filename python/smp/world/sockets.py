"""Opens the TCP connections of a process and exchanges the addresses of all ranks."""

from __future__ import annotations

import os
import socket
import time

import torch.distributed as dist

import smp._C as _C

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25
# Time without an answer of a host after which a request to the store on it fails.
_SILENT_STORE_S = 15


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


def with_own_connection(store: dist.Store) -> dist.Store:
    """Returns a store with the same keys whose requests do not wait for those of other threads.

    All requests of a connection to `TCPStore` wait for each other, and a constructor of Gloo may
    wait for a key of a rank that has ended.

    Args:
        store: the store.
    """
    server = store
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    if not isinstance(server, dist.TCPStore):
        return store
    own: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    end_silent_connections(server.port)
    return own


def end_silent_connections(port: int) -> None:
    """Makes requests fail that this process sends to a port, if the host there is cut off.

    A request to `TCPStore` has no time-out, and its socket belongs to PyTorch, so the sockets of
    this process are looked through.

    Args:
        port: port of the server.
    """
    for number in os.listdir("/proc/self/fd"):
        try:
            own = socket.socket(fileno=os.dup(int(number)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with own:
            try:
                peer = own.getpeername()
            except OSError:  # not connected
                continue
            is_tcp = own.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and own.type == socket.SOCK_STREAM and peer[1] == port:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_STORE_S // 3)
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_STORE_S // 3)
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_STORE_S)


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
