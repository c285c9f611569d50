"""A rank's number of open sockets and descriptors grows with the logarithm of the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp
from tests.dist.pool import Pool
from tests.installed import python_path
from tests.patience import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]


def measure(config: dict[str, Any], *arguments: str) -> list[dict[str, Any]]:
    """Results of `benchmarks/scale.py` with 8 and 16 processes."""
    command = [sys.executable, str(REPO / "benchmarks" / "scale.py"), "--processes", "8", "16"]
    done = subprocess.run(
        [*command, "--config", json.dumps(config), *arguments],
        env={
            **os.environ,
            "SMP_TRANSPORT": "tcp",
            "PYTHONPATH": python_path(REPO),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    results = [json.loads(line) for line in lines]
    assert [result["num_processes"] for result in results] == [8, 16]
    return results


@pytest.mark.alone
@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("hosts", ["1", "4"])
@pytest.mark.parametrize("degree", [1, 2])
def test_twice_the_ranks_are_a_few_more_descriptors(degree: int, hosts: str) -> None:
    # With 16 processes groups of two stages could sum by hosts, with 8 they cannot.
    backend = "flat" if degree == 2 else "auto"
    config = {"ddp": True, "pipeline_parallel_degree": degree, "ddp_dist_backend": backend}
    few, many = measure(config, "--hosts", hosts)
    assert few["init_sockets"] > 4 and few["step_sockets"] > 4
    for when in ("init", "step"):
        # A doubling adds a connection each way to the connections of this process, and to each
        # group of torch, of which there are the world and, with a pipeline, the data-parallel one.
        assert many[f"{when}_sockets"] - few[f"{when}_sockets"] <= 8
        assert many[f"{when}_descriptors"] - few[f"{when}_descriptors"] <= 8
        assert many[f"{when}_threads"] - few[f"{when}_threads"] <= 2


def num_sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:  # the descriptor of the listing itself
            continue
    return count


def sockets_of_torch_groups(rank: int) -> tuple[int, int]:
    """Counts sockets before and after the groups of users ran all kinds of collectives."""
    before = num_sockets()
    smp.init({"ddp": True})
    for group in (smp.get_dp_process_group(), smp.get_world_process_group()):
        value = torch.ones(3)
        dist.all_reduce(value, group=group)
        assert value.tolist() == [smp.size()] * 3
        dist.barrier(group)
        dist.broadcast(value, 0, group=group)
    world = dist.group.WORLD
    assert world is not None
    gloo = world._get_backend(torch.device("cpu"))
    assert dist.get_backend(world) == "gloo" and gloo.size() == smp.size()
    return before, num_sockets()


def test_torch_groups_do_not_connect_each_rank_with_each(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = pool.run(8, sockets_of_torch_groups, env={"TORCH_GLOO_LAZY_INIT": "0"})
    lazy = pool.run(8, sockets_of_torch_groups)
    for (eager_before, eager_after), (lazy_before, lazy_after) in zip(eager, lazy, strict=True):
        assert (lazy_after - lazy_before) < (eager_after - eager_before)
