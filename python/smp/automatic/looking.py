"""Looks at the devices of a job: free memory, measured products, copies and links."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from smp_cli.cores import usable_cores

import smp._C as _C
from smp._device import device_module, is_accelerator
from smp.observe.verification.memory_needed import free_bytes
from smp.planning.hardware import Hardware, Link
from smp.world import comm
from smp.world.rank import Rank

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_WINDOW_S = 0.15  # of one measurement, the same on all ranks
_FEWEST = 3
_WIDTHS = {"cpu": 768}  # of a product; of others the width is below
_DEVICE_WIDTH = 4096
_MOVED_BYTES = {"cpu": 32 << 20}
_DEVICE_MOVED_BYTES = 256 << 20
_SMALL_BYTES, _LARGE_BYTES, _SUM_BYTES = 8, 4 << 20, 8 << 20
_SMALL_REPEATS, _LARGE_REPEATS, _SUMS = 50, 4, 3
_LIMIT_S = 60.0
# Links of a job without the other kind: what a plan computes with does not use them.
_NO_LINK = Link(1e9, 1e-4)


@dataclass(frozen=True)
class RankFacts:
    """Figures of the device of one rank, taken while all ranks take theirs.

    Attributes:
        host: name of the host.
        device: name of the device.
        free_bytes: free memory; on the CPU the share of this rank.
        flops: FLOP/s of a large product in the precision of the plan.
        moved: bytes per second that a copy on the device reads and writes.
        copied: bytes per second from the host to the device.
        cores: CPU devices: ranks of the host that run at full speed at one time; 0 for others.
    """

    host: str
    device: str
    free_bytes: float
    flops: float
    moved: float
    copied: float
    cores: int


@dataclass(frozen=True)
class Seen:
    """Figures of all devices of a job and of the links between them.

    Attributes:
        ranks: figures of each rank.
        inside: link between ranks of a host; None: no host has two.
        between: link between hosts; None: there is one host.
        collective: sums over all ranks; None: there is one rank, or there are several hosts.
    """

    ranks: tuple[RankFacts, ...]
    inside: Link | None = None
    between: Link | None = None
    collective: Link | None = None

    @property
    def hosts(self) -> list[str]:
        """Returns the names of the hosts."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def per_host(self) -> int:
        """Returns the devices of a host that a plan counts with."""
        names = [rank.host for rank in self.ranks]
        return reduce(math.gcd, (names.count(host) for host in self.hosts))

    def hardware(self, precision: str) -> Hardware:
        """Returns the hardware of a plan: each device counts as the weakest one."""
        least = partial(_least, self.ranks)
        cores = self.ranks[0].cores
        return Hardware(
            name=self.ranks[0].device,
            source="measured by smp.auto",
            flops={precision: least("flops") * max(1.0, self.per_host / cores if cores else 1.0)},
            product_share=1.0,
            memory_bytes=int(least("free_bytes")),
            memory_bytes_per_s=least("moved"),
            inside=self.inside or self.between or _NO_LINK,
            between=self.between or self.inside or _NO_LINK,
            host_copy_bytes_per_s=least("copied"),
            at_once=cores,
            devices_per_host=self.per_host,
            collective=self.collective,
        )


def _least(ranks: Sequence[RankFacts], name: str) -> float:
    return min(float(getattr(rank, name)) for rank in ranks)


def look(rank: Rank, precision: str) -> Seen:
    """Measures all devices at the same time, then links one by one. Collective over all ranks.

    Args:
        rank: rank of this process, in a world without a pipeline.
        precision: "fp32", "bf16" or "fp16".
    """
    comm.barrier()
    own = _own_facts(rank, DTYPES[precision])
    ranks = tuple(comm.allgather(own, comm.CommGroup.WORLD))
    hosts = [one.host for one in ranks]
    found: dict[str, Link] = {}
    for name, peer in _peers(hosts).items():
        link = _measure_link(rank, peer)
        found[name] = comm.allgather(link, comm.CommGroup.WORLD)[0]
    if "inside" in found and len(set(hosts)) == 1:
        sums = comm.allgather(_sums_per_s(rank), comm.CommGroup.WORLD)
        found["collective"] = Link(min(sums), found["inside"].latency_s)
    return Seen(ranks, **found)


def _peers(hosts: Sequence[str]) -> dict[str, int]:
    """Returns ranks to which the first rank's link is measured, by kind of link."""
    near = next((rank for rank, host in enumerate(hosts) if rank and host == hosts[0]), None)
    far = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    return {name: r for name, r in (("inside", near), ("between", far)) if r is not None}


def free_now(rank: Rank) -> float:
    """Returns the free memory of this rank's device."""
    return free_bytes(rank.device, max(1, rank.launch.local_size))


def _own_facts(rank: Rank, dtype: torch.dtype) -> RankFacts:
    device = rank.device
    free = free_now(rank)
    width = _WIDTHS.get(device.type, _DEVICE_WIDTH)
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    product_s = _typical_s(partial(torch.mm, left, right), device)
    num_bytes = _MOVED_BYTES.get(device.type, _DEVICE_MOVED_BYTES)
    here = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    move_s = _typical_s(lambda: there.copy_(here), device)
    copy_s = move_s
    if is_accelerator(device):
        outside = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
        copy_s = _typical_s(lambda: here.copy_(outside, non_blocking=True), device)
    is_cpu = not is_accelerator(device)
    return RankFacts(
        host=rank.launch.hostname,
        device="CPU" if is_cpu else device_module(device).get_device_name(device),
        free_bytes=free,
        flops=2 * width**3 / product_s,
        moved=2 * num_bytes / move_s,  # a copy reads and writes each byte
        copied=num_bytes / copy_s,
        cores=max(1, usable_cores() // torch.get_num_threads()) if is_cpu else 0,
    )


def _typical_s(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median over a window of time, the same on all ranks that measure together."""

    def timed() -> float:
        started_s = time.perf_counter()
        run()
        if is_accelerator(device):
            device_module(device).synchronize(device)
        return time.perf_counter() - started_s

    timed()
    samples: list[float] = []
    begin_s = time.perf_counter()
    while len(samples) < _FEWEST or time.perf_counter() - begin_s < _WINDOW_S:
        samples.append(timed())
    return statistics.median(samples)


def _measure_link(rank: Rank, peer: int) -> Link | None:
    """Returns the link from the first rank to another one, measured by the first. Collective."""
    assert rank.mailbox is not None and rank.board is not None, "there are several ranks"
    probe = _C.LinkProbe(rank.mailbox, rank.board)
    comm.barrier()
    link = None
    if rank.global_rank == 0:
        small = probe.measure(peer, _SMALL_BYTES, _SMALL_REPEATS, _LIMIT_S)
        large = probe.measure(peer, _LARGE_BYTES, _LARGE_REPEATS, _LIMIT_S, str(rank.device))
        latency_s = statistics.median(both for _, both in small) / 2
        # Each byte travels there and back.
        link = Link(2 * _LARGE_BYTES / min(both for _, both in large), latency_s)
    comm.barrier()
    return link


def _sums_per_s(rank: Rank) -> float:
    """Returns bytes that a rank of a ring sends per second in a sum. Collective."""
    communicator = rank.comms.dp_cp
    assert communicator is not None, "there are several ranks"
    values = torch.zeros(_SUM_BYTES // 4, device=rank.device)
    spent = []
    for _ in range(_SUMS):
        comm.barrier()
        started_s = time.perf_counter()
        communicator.all_reduce(values).wait(rank.timeout_s)
        if is_accelerator(rank.device):
            device_module(rank.device).synchronize(rank.device)
        spent.append(time.perf_counter() - started_s)
    size = rank.world_size
    return 2 * (size - 1) / size * _SUM_BYTES / min(spent)
