"""Measures one way and round trip of a message between two ranks of this machine.

Through shared memory and over the communicator, in turns; each message is posted after the answer
to the last one has come, so the receiver sleeps when it arrives. The baseline `copy_us` is one copy
of the same bytes into new memory.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field

import torch
from timer import Timing
from torch import distributed
from torch.distributed import PrefixStore
from workers import Worker

import smp
from smp import _C
from smp.world.groups import over_gloo, over_sockets
from smp.world.sockets import open_sockets

TIMEOUT_S = 60.0


@dataclass
class Contender:
    """A mailbox of its own, and what was measured with it."""

    mailbox: _C.Mailbox
    probe: _C.LinkProbe
    one_way_s: list[float] = field(default_factory=list)
    round_trip_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


def main() -> None:
    worker = Worker("transport")
    worker.start({})
    contenders = {
        name: make_contender(name, worker.config.get("ring_mb", 8))
        for name in ("shared_memory", "gloo", "tcp")
    }
    for num_bytes, num_messages in worker.config["messages"]:
        for contender in contenders.values():
            contender.one_way_s, contender.round_trip_s = [], []
            contender.cpu_s = 0.0
        for turn in range(worker.warmup + worker.repeats):
            for contender in contenders.values():
                measure(contender, num_bytes, num_messages, turn >= worker.warmup)
        copy_s = copy_time_s(num_bytes)
        for name, contender in contenders.items():
            report(worker, f"{name}_{num_bytes}_bytes", contender, copy_s)
    for contender in contenders.values():
        contender.mailbox.close()
    smp.shutdown()


def make_contender(name: str, ring_mb: int) -> Contender:
    store = PrefixStore(f"transport/{name}", distributed.distributed_c10d._get_default_store())
    board = _C.FaultBoard(smp.rank())
    sockets = None
    if name == "tcp":
        sockets = open_sockets(
            store,
            smp.rank(),
            smp.size(),
            loopback=True,
            towards="127.0.0.1",
            secret=b"known to the ranks of this benchmark",
            board=board,
            timeout_s=TIMEOUT_S,
        )
        make = over_sockets(sockets)
    else:
        make = over_gloo(store, smp.rank(), loopback=True, timeout_s=TIMEOUT_S)
    world = make("world", range(smp.size()))
    shared_memory = None
    if name == "shared_memory":
        shared_memory = _C.connect_shared_memory(
            world, board, machine="", ring_bytes=ring_mb << 20, timeout_s=TIMEOUT_S
        )
        assert shared_memory.peers == [1 - smp.rank()], "the ranks share no memory"
    mailbox = _C.Mailbox(world, board, shared_memory, sockets=sockets)
    return Contender(mailbox, _C.LinkProbe(mailbox, board))


def measure(contender: Contender, num_bytes: int, num_messages: int, counts: bool) -> None:
    """Takes one turn; rank 1 sleeps in the barrier while its receiving thread answers."""
    distributed.barrier()
    started_cpu_s = time.process_time()
    if smp.rank() == 0:
        for one_way_s, round_trip_s in contender.probe.measure(1, num_bytes, num_messages):
            if counts:
                contender.one_way_s.append(one_way_s)
                contender.round_trip_s.append(round_trip_s)
    distributed.barrier()
    if counts:
        contender.cpu_s += time.process_time() - started_cpu_s


def copy_time_s(num_bytes: int, repeats: int = 200) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    samples = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        source.clone()
        samples.append(time.perf_counter() - started_s)
    return statistics.median(samples)


def report(worker: Worker, name: str, contender: Contender, copy_s: float) -> None:
    cpu_s = torch.tensor(contender.cpu_s)
    distributed.all_reduce(cpu_s)
    if smp.rank() != 0:
        return
    one_way = Timing(tuple(contender.one_way_s))
    round_trip = Timing(tuple(contender.round_trip_s))
    worker.emit(
        name,
        {
            **one_way.summary("one_way_", scale=1e6, unit="us"),
            "one_way_p95_us": statistics.quantiles(one_way.samples_s, n=20)[-1] * 1e6,
            **round_trip.summary("round_trip_", scale=1e6, unit="us"),
            "cpu_us_per_message": cpu_s.item() / (2 * len(one_way.samples_s)) * 1e6,
            "copy_us": copy_s * 1e6,
            "messages": 2 * len(one_way.samples_s),
            "load_average": os.getloadavg()[0],
        },
    )


if __name__ == "__main__":
    main()
