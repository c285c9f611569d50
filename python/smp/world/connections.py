"""Connects a process to the other ranks: liveness, messages, objects."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import smp._C as _C
from smp.world import process_hooks
from smp.world.groups import can_make_channels, make_channel, over_gloo, over_sockets
from smp.world.host_groups import CpuGroups
from smp.world.presence import await_key
from smp.world.sockets import open_sockets

_POLL_S = 0.002
_LINGER_S = 10.0  # time for the last goodbyes to arrive


class Connections:
    """The connections of one rank in a world of several. Collective to make.

    Liveness comes first, so that every later failure is reported.
    """

    def __init__(
        self,
        global_rank: int,
        coordinates: Sequence[str],
        timeout_s: float,
        hang_s: float,
        hang_raises: bool,
        device: torch.device,
        meter: _C.DeviceMeter,
    ) -> None:
        """
        Args:
            global_rank: global rank of this process.
            coordinates: words for each rank, index = global rank.
            timeout_s: bound of every wait, in seconds.
            hang_s: seconds without progress after which a hang is reported; 0: never.
            hang_raises: whether a rank that is stuck for twice as long ends the run.
            device: device of this rank, current in the threads of the connections.
            meter: progress of that device, which also counts as progress of this rank.
        """
        self._global_rank = global_rank
        self._world_size = len(coordinates)
        self._timeout_s = timeout_s
        self._hang_s, self._hang_raises = hang_s, hang_raises
        self._device = str(device)
        self.board = _C.FaultBoard(global_rank)
        meter.count_on(self.board)
        self.board.set_coordinates(list(coordinates))
        self.stops = _C.StopAgreement(self.board)
        self.has_failed = False  # this rank raised, and will not say goodbye
        self.failed_in = ""  # module and microbatch
        self.mailbox: _C.Mailbox | None = None
        self.exchange: _C.ObjectExchange | None = None
        self.is_watched = False  # liveness has begun: other ranks notice a failure of this one
        self._hub: _C.LivenessHub | None = None
        self._client: _C.LivenessClient | None = None
        self._world: _C.Communicator | None = None
        self._sockets: _C.PeerSockets | None = None
        self._on_cpu: CpuGroups | None = None

    @property
    def on_cpu(self) -> CpuGroups:
        """Makes groups for the CPU, once this process is connected."""
        assert self._on_cpu is not None
        return self._on_cpu

    def connect(
        self,
        store: dist.Store,
        *,
        own_host: str,
        own_address: str,
        loopback: bool,
        secret: bytes,
        transport: str,
        machine: str,
        shared_memory: bool,
        ring_mb: int,
        pipeline: int,
        lane: str,
        lane_slot_mb: int,
    ) -> None:
        """Connects to all other ranks. Collective.

        Args:
            store: keys of this init.
            own_host: address of this machine as others see it; rank 0 publishes its own.
            own_address: the same as a number, to listen at; empty: unknown, listen at all.
            loopback: whether all ranks are on one machine; then nothing listens elsewhere.
            secret: secret of this job, which both sides of each connection prove to know.
            transport: "gloo", "tcp" or "mpi", the last for messages only.
            machine: text that is equal on ranks that may share memory.
            shared_memory: whether this rank wants to share memory.
            ring_mb: MiB of shared memory for the messages from each other rank to this one.
            pipeline: number that is equal on ranks that send each other tensors of devices.
            lane: "auto", "ipc", "nccl" or "host": how tensors are copied from device to device.
            lane_slot_mb: MiB of one slot between devices.
        """
        rank, size = self._global_rank, self._world_size
        if rank == 0:
            self._hub = _C.LivenessHub(
                size,
                address="127.0.0.1" if loopback else own_address,
                secret=secret,
                hang_after_s=self._hang_s,
                hang_raises=self._hang_raises,
            )
            host = "127.0.0.1" if loopback else own_host
            store.set("liveness", f"{host} {self._hub.port}")
        look = self.board.raise_if_faulted
        await_key(store, rank, size, "liveness", self._timeout_s, look)
        host, port = store.get("liveness").decode().split()
        stacks_signals, stacks_fd = process_hooks.register_stack_dump()
        self._client = _C.LivenessClient(
            host,
            int(port),
            secret=secret,
            global_rank=rank,
            board=self.board,
            stops=self.stops,
            stacks_signals=stacks_signals,
            stacks_fd=stacks_fd,
            hang_after_s=self._hang_s,
            hang_raises=self._hang_raises,
            interrupt_signal=process_hooks.register_interrupt(self._raise_if_stuck),
            device=self._device,
        )
        self.is_watched = True
        if transport == "tcp":
            self._sockets = open_sockets(
                store,
                rank,
                size,
                loopback=loopback,
                towards=host,
                secret=secret,
                board=self.board,
                timeout_s=self._timeout_s,
            )
            self._on_cpu = over_sockets(self._sockets)
        else:
            self._on_cpu = over_gloo(
                store, rank, loopback=loopback, timeout_s=self._timeout_s, board=self.board
            )
        if transport == "mpi":
            self._world = _C.make_mpi_world()
        else:
            self._world = self._on_cpu("world", range(size))
        shared = _C.connect_shared_memory(
            self._world,
            self.board,
            machine=machine,
            enabled=shared_memory,
            ring_bytes=ring_mb << 20,
            timeout_s=self._timeout_s,
        )
        self.mailbox = _C.Mailbox(
            self._world,
            self.board,
            shared,
            self._device,
            machine=machine,
            pipeline=pipeline,
            lane=lane,
            slot_bytes=lane_slot_mb << 20,
            **self._channel_arguments(store),
            timeout_s=self._timeout_s,
            sockets=self._sockets,
        )
        self.exchange = _C.ObjectExchange(self.mailbox, self.board, self._timeout_s)

    def _channel_arguments(self, store: dist.Store) -> dict[str, Any]:
        """Returns the mailbox's arguments for copies between devices of different hosts."""
        if not can_make_channels(self._device):
            return {}

        def make(src: int, dst: int, index: int) -> _C.Communicator:
            return make_channel(
                self._device, store, src, dst, index, self._global_rank, self._timeout_s
            )

        flights = _C.FlightWatch(
            self.board, self._device, timeout_s=self._timeout_s, report_after_s=self._hang_s
        )
        return {
            "make_channel": make,
            "flights": flights,
            "nccl_host": os.environ.get("NCCL_HOSTID", ""),
            "launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", ""),
        }

    def wait_for_all(self, what: str) -> None:
        """Waits until all ranks have made their connections. Collective.

        A rank is connected before its peers have noticed. If its script failed at once and it left,
        they would report a broken socket instead of its error.
        """
        assert self.exchange is not None
        self.exchange.barrier(list(range(self._world_size)), what)

    @property
    def is_healthy(self) -> bool:
        """True while no rank is known to have failed."""
        return not self.has_failed and self.board.fault_text() is None

    def _raise_if_stuck(self) -> None:
        """Interrupts the script if this rank was declared stuck while other ranks waited."""
        if not self.has_failed:
            self.board.raise_if_faulted()

    def report_raised(self, where: str, text: str) -> None:
        """Reports to all other ranks that this one has failed."""
        self.has_failed = True
        self.failed_in = self.failed_in or where  # the first is the innermost
        if self._client is not None:
            self._client.report_raised(where, text)

    def request_stop(self) -> None:
        """Asks all ranks to stop at one boundary."""
        if self._client is not None:
            self._client.request_stop()

    def leave(self, timeout_s: float | None = None) -> None:
        """Says goodbye and waits until all others have, or one has failed.

        A rank that still needs this one raises when it receives the goodbye, so this wait cannot
        block for ever.

        Args:
            timeout_s: longest wait; None: the bound of every wait.
        """
        if self._client is None or self.has_failed:
            return
        self._client.leave()
        others = [rank for rank in range(self._world_size) if rank != self._global_rank]
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        while self.board.fault_text() is None and time.monotonic() < deadline:
            if all(self.board.has_left(rank) for rank in others):
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends threads and connections."""
        is_healthy = self.is_healthy
        if self.mailbox is not None:
            self.mailbox.close()
        if self._world is not None and not is_healthy:
            self._world.abort()
        self.exchange = self.mailbox = self._world = self._on_cpu = None
        if self._sockets is not None:
            self._sockets.close()
        if self._client is not None:
            self._client.close()
        if self._hub is not None:
            self._hub.close(_LINGER_S if is_healthy else 0.0)
