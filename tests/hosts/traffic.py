"""What goes through the interfaces of hosts while ranks talk or train. Runs in the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import smp
from tests.hosts.network import Traffic, read_traffic

DEVICES = ("eth0", "lo")


@dataclass(frozen=True)
class Measured:
    """Of one host, while all ranks did one thing."""

    across: Traffic
    """Through its interface to other hosts."""
    inside: Traffic
    """Over sockets between its own processes."""


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
    """A step of two stages, `width` x `width` each, and two replicas, after one that warms up."""
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
