"""Ranks of one host exchange tensors through shared memory, which leaves nothing behind."""

from __future__ import annotations

import gc
import os
import re
import signal
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.observe.metrics import difference, server_stats
from smp.world import runtime
from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_ranks
from tests.harness import train_step_of

pytestmark = pytest.mark.alone

SCRIPT = REPO / "tests" / "dist" / "scripts" / "transport.py"
ROWS, WIDTH = 512, 256
ACTIVATION_BYTES = ROWS * WIDTH * 4


def train(rank: int, steps: int = 1) -> dict[str, Any]:
    """A pipeline of two; what the messages took, and the gradients of this rank."""
    torch.manual_seed(0)
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
    layers = []
    for index in range(2):
        with smp.partition(index):
            layers.append(nn.Linear(WIDTH, WIDTH))
    model = smp.DistributedModel(nn.Sequential(*layers))
    train_step = train_step_of(model)
    x = torch.randn(ROWS, WIDTH)
    train_step(x)  # partitions
    before = server_stats()
    for _ in range(steps):
        train_step(x)
    stats = difference(server_stats(), before)
    norm = sum(float(p.grad.square().sum()) for p in model.local_parameters() if p.grad is not None)
    return {"stats": stats, "norm": norm, "threads": thread_names()}


def thread_names() -> set[str]:
    names = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
            names.add(file.read().strip())
    return names


def test_cpu_tensors_go_through_shared_memory(pool: Pool) -> None:
    for result in pool.run(2, train):
        stats = result["stats"]
        assert stats["bytes_sent"] > ACTIVATION_BYTES
        for name in ("messages_sent", "bytes_sent", "messages_received", "bytes_received"):
            assert stats[f"shared_memory_{name}"] == stats[name] > 0
        assert "smp-recv-shm" in result["threads"]
        assert not {name for name in result["threads"] if re.fullmatch(r"smp-recv-\d", name)}


def test_without_shared_memory_the_communicator_gives_the_same_gradients(pool: Pool) -> None:
    shared = pool.run(2, train)
    others = pool.run(2, train, env={"SMP_SHM": "0"})
    for one, other in zip(shared, others, strict=True):
        assert other["stats"]["shared_memory_messages_sent"] == 0
        assert other["stats"]["bytes_sent"] > ACTIVATION_BYTES
        assert "smp-recv-shm" not in other["threads"]
        assert one["norm"] == other["norm"] > 0


def test_messages_of_many_rings_arrive(pool: Pool) -> None:
    tiny = pool.run(2, exchange_large, 24, env={"SMP_SHM_RING_MB": "1"})
    assert all(result["shared_memory_bytes_sent"] > 24 << 20 for result in tiny)


def exchange_large(rank: int, num_mb: int) -> dict[str, int]:
    smp.init({"ddp": True})
    data = bytes(range(256)) * (num_mb << 12)
    received = smp.allgather(data, smp.WORLD)
    assert received == [data, data]
    mailbox = runtime.current().rank.mailbox
    assert mailbox is not None
    return mailbox.stats()


def shared_peers(rank: int, hosts: str) -> list[int]:
    """Other ranks whose memory this one maps, by the ranks that reach it through memory."""
    os.environ["SMP_HOSTNAME"] = hosts[rank]
    smp.init({"ddp": True})
    current = runtime.current()
    assert current.rank.exchange is not None and current.rank.mailbox is not None
    peers = []
    for other in range(smp.size()):
        before = current.rank.mailbox.stats()["shared_memory_messages_sent"]
        if other != rank:
            current.rank.exchange.all_gather(sorted((rank, other)), b"")
        if current.rank.mailbox.stats()["shared_memory_messages_sent"] > before:
            peers.append(other)
    return peers


def test_simulated_hosts_share_no_memory(pool: Pool) -> None:
    assert pool.run(4, shared_peers, "abab") == [[2], [3], [0], [1]]


def test_one_line_says_why_ranks_of_one_host_share_nothing(pool: Pool) -> None:
    outputs = pool.run(2, messages_of_init)
    assert len(re.findall("instead of shared memory", outputs[0])) == 1, outputs[0]
    assert "global_rank 1 has SMP_SHM=0" in outputs[0]
    assert "instead of shared memory" not in outputs[1]


def messages_of_init(rank: int) -> str:
    """Returns init's output on stderr when rank 1 alone wants no shared memory."""
    os.environ["SMP_SHM"] = "01"[rank == 0]
    reader, writer = os.pipe()
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        smp.init({"ddp": True})
    finally:
        os.dup2(stderr, 2)
        os.close(writer)
        os.close(stderr)
    smp.barrier()
    with os.fdopen(reader, encoding="utf-8") as file:
        return file.read()


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_leaves_no_memory(pool: Pool, victim: int) -> None:
    before = set(os.listdir("/dev/shm"))
    results = run_ranks(pool, SCRIPT, 2, [str(victim)], 60)
    assert results[victim].returncode == -signal.SIGKILL, results[victim].output
    survivor = results[1 - victim]
    assert not survivor.hung and survivor.returncode not in (0, -signal.SIGKILL), survivor.output
    assert f"global_rank {victim}" in survivor.output
    memories = [set(re.findall(r"^MEMORY (.*)$", r.output, re.MULTILINE)) for r in results]
    assert len(memories[0]) == 2 and memories[0] == memories[1], "each maps its own and the other's"
    assert {name for name in os.listdir("/dev/shm") if name.startswith("smp")} <= before
    for result in results:
        assert not re.search(r"^SHM .*smp", result.output, re.MULTILINE), result.output
    assert not memories[0] & mapped_anywhere()


def mapped_anywhere() -> set[str]:
    """Shared rings that some process of this user still maps, as ``device:inode``."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
                lines = [line.split() for line in file if "memfd:smp-rings" in line]
        except OSError:
            continue
        found |= {f"{words[3]}:{words[4]}" for words in lines}
    return found


def test_shared_memory_is_given_back_at_shutdown(pool: Pool) -> None:
    # Messages and collectives have two mappings each: the rank's own and the other's.
    assert pool.run(2, rings_after_shutdown) == [(4, 0), (4, 0)]


def rings_after_shutdown(rank: int) -> tuple[int, int]:
    def num_rings() -> int:
        with open("/proc/self/maps", encoding="utf-8") as file:
            return sum("memfd:smp-rings" in line for line in file)

    gc.collect()  # models of earlier tests, which are cycles and hold what they used
    smp.init({"ddp": True})
    during = num_rings()
    smp.shutdown()
    return during, num_rings()
