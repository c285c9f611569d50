"""Measures traffic of hosts' interfaces while ranks communicate or train. Runs in the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import smp
from smp.model import engine_of
from smp.world import runtime
from tests.hosts.network import Traffic, read_traffic

DEVICES = ("eth0", "lo")


@dataclass(frozen=True)
class Measured:
    """Traffic of one host while all ranks did one thing."""

    across: Traffic
    """Bytes through its interface to other hosts."""
    inside: Traffic
    """Bytes over sockets between its own processes."""


def measure(action: Callable[[], None]) -> Measured:
    """Runs an action on all ranks between two barriers. Collective."""
    smp.barrier()
    before = [read_traffic(device) for device in DEVICES]
    smp.barrier()
    action()
    smp.barrier()
    return Measured(
        *(read_traffic(device).since(b) for device, b in zip(DEVICES, before, strict=True))
    )


@dataclass(frozen=True)
class Summed:
    """Measurements of one rank for sums over replicas."""

    measured: Measured
    seconds: list[float]
    """Times of the sums, each from a barrier until the sum is there."""
    by_hosts: dict[str, tuple[int, int]]
    """Groups that go by hosts."""


def sum_replicas(rank: int, backend: str, num_bytes: int, repeats: int) -> Summed:
    """Sums of a tensor over all ranks, as reducers begin them; one before, which connects."""
    smp.init({"ddp": True, "ddp_dist_backend": backend})
    comms = runtime.current().rank.comms
    dp = comms.dp_cp
    assert dp is not None
    expected = sum(range(1, smp.size() + 1))
    seconds = []

    def sum_up() -> None:
        tensor = torch.full((num_bytes // 4,), float(rank + 1))
        smp.barrier()
        began_s = time.perf_counter()
        dp.all_reduce(tensor).wait(120.0)
        seconds.append(time.perf_counter() - began_s)
        assert bool((tensor == expected).all())

    def action() -> None:
        for _ in range(repeats):
            sum_up()

    sum_up()
    seconds.clear()
    return Summed(measure(action), seconds, comms.by_hosts)


def train_shards(rank: int, keys: dict[str, Any], width: int) -> tuple[Measured, int]:
    """A step of two layers `width` x `width` whose state is shared, and its update; one before.

    Returns:
        what went through interfaces, and the bytes of whole parameters that were gathered.
    """
    smp.init({"ddp": True, "sdp_param_persistence_threshold": 0, **keys})
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(4, width)

    def action() -> None:
        train_step(x)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.5)  # updates may still be gathered, for which no rank has to wait

    def gathered() -> int:
        store = getattr(engine_of(model).storage, "store", None)
        return 0 if store is None else int(store.stats.gathered_bytes)

    action()
    before = gathered()
    return measure(action), gathered() - before


def send_objects(rank: int, pairs: list[tuple[int, int]], num_bytes: int) -> list[Measured]:
    """A tensor from one rank to another one, pair by pair."""
    smp.init({"ddp": True})
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    measured = []
    for source, destination in pairs:

        def action(source: int = source, destination: int = destination) -> None:
            if rank == source:
                smp.send(tensor, destination, smp.RankType.WORLD_RANK)
            elif rank == destination:
                received = smp.recv_from(source, smp.RankType.WORLD_RANK)
                assert torch.equal(received, tensor)

        measured.append(measure(action))
    return measured


def train_pipelines(rank: int, placement: str, width: int, rows: int) -> Measured:
    """Measures the second step of two stages, `width` x `width` each, and two replicas."""
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "placement_strategy": placement,
            "microbatches": 1,
            "ddp": True,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    torch.manual_seed(0)
    layers = []
    for index in range(2):
        with smp.partition(index):
            layers.append(nn.Linear(width, width, bias=False))
    model = smp.DistributedModel(nn.Sequential(*layers))

    @smp.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(rows, width)
    train_step(x)

    def action() -> None:
        train_step(x)

    measured = measure(action)
    assert all(p.grad is not None for p in model.local_parameters())
    return measured
