"""What a rank has open does not grow with the number of ranks, but with its logarithm."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import smp
from tests.dist.pool import Pool


def num_sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:  # the descriptor of the listing itself
            continue
    return count


def sockets_of_torch_groups(rank: int) -> tuple[int, int]:
    """Without and with the groups of users; all kinds of collectives have run."""
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
