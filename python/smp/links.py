"""What connects a process to the others: liveness, messages, objects."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import torch.distributed as dist

from smp import _C
from smp.groups import make_world

_POLL_S = 0.002


class Links:
    """Connections of one rank of a world of more than one. Collective to make.

    Liveness comes first, so that whatever happens afterwards is already reported.
    """

    def __init__(
        self,
        store: dist.Store,
        global_rank: int,
        coordinates: Sequence[str],
        *,
        hub_host: str,
        loopback: bool,
        transport: str,
        timeout_s: float,
    ) -> None:
        """
        Args:
            store: keys of this init.
            global_rank: of this process.
            coordinates: words for each rank, index = global rank.
            hub_host: address of rank 0 as seen by the others.
            loopback: all ranks are on one machine.
            transport: "gloo" or "mpi".
            timeout_s: bound of every wait.
        """
        self._global_rank = global_rank
        self._world_size = len(coordinates)
        self._timeout_s = timeout_s
        self.board = _C.FaultBoard(global_rank)
        self.board.set_coordinates(list(coordinates))
        self._hub: _C.LivenessHub | None = None
        if global_rank == 0:
            token = secrets.token_hex(16)
            self._hub = _C.LivenessHub(self._world_size, loopback, token)
            store.set("liveness", f"{self._hub.port} {token}")
        port, token = store.get("liveness").decode().split()
        self._client = _C.LivenessClient(hub_host, int(port), global_rank, token, self.board)
        if transport == "mpi":
            self._world = _C.make_mpi_world()
        else:
            self._world = make_world(
                store, global_rank, self._world_size, loopback=loopback, timeout_s=timeout_s
            )
        self.mailbox = _C.Mailbox(self._world, self.board)
        self.exchange = _C.ObjectExchange(self.mailbox, self.board, timeout_s)

    def report_raised(self, where: str, text: str) -> None:
        """Tells all other ranks that this one cannot go on."""
        self._client.report_raised(where, text)

    def leave(self) -> None:
        """Says goodbye and waits until all have, or one has failed.

        A rank that still needs this one raises as soon as it hears of the goodbye, so this does
        not wait for something that cannot happen.
        """
        self._client.leave()
        deadline = time.monotonic() + self._timeout_s
        while not self.board.fault_text() and time.monotonic() < deadline:
            if all(self.board.has_left(rank) for rank in range(self._world_size)):
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends threads and connections."""
        self.exchange.close()
        self.mailbox.close()
        self._world.abort()
        self._client.close()
        if self._hub is not None:
            self._hub.close()
