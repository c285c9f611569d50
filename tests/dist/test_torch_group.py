"""Processes with a group of `torch.distributed` and no variables of a launcher are its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import smp
from smp._torch_releases import tcp_store
from tests.dist.pool import Pool
from tests.dist.zygote import RANK_VARIABLES


def free_port() -> int:
    store = tcp_store("127.0.0.1", 0, 1, is_master=True)
    return int(store.port)


def form_group(rank: int, size: int, address: str) -> None:
    """Forms a group of `torch.distributed`, as a script does that starts its own processes."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)


def talk(rank: int, size: int, address: str, keys: dict[str, object]) -> list[int]:
    form_group(rank, size, address)
    try:
        smp.init({"ddp": True, **keys})
        assert (smp.rank(), smp.size(), smp.local_rank()) == (rank, size, rank)
        assert smp.get_world_process_group() is dist.group.WORLD, "the group that was there"
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total, group=smp.get_dp_process_group())
        seen = [int(total.item()), *smp.allgather(rank, smp.WORLD)]
        smp.shutdown()
        assert dist.is_initialized(), "it belongs to the script"
        return seen
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_of_a_group_of_torch_work_together(pool: Pool, tmp_path: Path, kind: str) -> None:
    address = f"file://{tmp_path}/meet"
    if kind == "tcp":
        address = f"tcp://127.0.0.1:{free_port()}"
    assert pool.run(2, talk, 2, address, {}) == [[3, 0, 1]] * 2
