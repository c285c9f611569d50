"""Ranks, groups and process groups in real processes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp
from smp import _C
from smp.world import groups, runtime
from smp.world.launch import read_launch
from smp.world.process_groups import TorchGroups
from smp.world.rendezvous import MeetingPoint
from tests.dist.pool import Pool
from tests.patience import PATIENCE_S, wait_until

KINDS = ("world", "mp", "dp", "pp", "tp", "rdp", "cp")


def thread_names() -> Counter[str]:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return Counter(names)


def wait_for_threads_to_go(before: Counter[str]) -> None:
    """Waits until no thread is there that `before` lacks.

    The kernel lists a thread for a moment after it was joined, and one of an earlier test may
    still be in `before`.
    """
    wait_until(lambda: thread_names() <= before, show=lambda: thread_names() - before)


# ---- ranks and lists ---------------------------------------------------------------


def read_everything(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    smp.init(config)
    assert smp.rank() == rank
    assert smp.local_rank() == rank
    return {
        "ranks": {k: getattr(smp, f"{k}_rank")() for k in KINDS[1:]},
        "sizes": {k: getattr(smp, f"{k}_size")() for k in KINDS[1:]},
        "groups": {k: getattr(smp, f"get_{k}_group")() for k in KINDS},
        "size": (smp.size(), smp.local_size()),
    }


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("placement", ["cluster", "spread", "CPTD"])
def test_public_functions_agree_with_the_grid(pool: Pool, placement: str, cp: int) -> None:
    config = {"partitions": 2, "ddp": True, "placement_strategy": placement}
    config["context_parallel_degree"] = cp
    grid = _C.ProcessGrid(4, 2, 1, cp, placement)
    for rank, seen in enumerate(pool.run(4, read_everything, config)):
        assert seen["size"] == (4, 4)
        for kind in KINDS:
            assert seen["groups"][kind] == grid.group(kind, rank)
        for kind in KINDS[1:]:
            assert seen["ranks"][kind] == grid.group_rank(kind, rank)
            assert seen["sizes"][kind] == grid.group_size(kind)


def read_local(rank: int) -> tuple[int, int, tuple[str, ...]]:
    os.environ["SMP_HOSTNAME"] = "ab"[rank % 2]
    smp.init({"partitions": 4})
    return smp.local_rank(), smp.local_size(), runtime.current().rank.launch.hosts


def test_local_ranks_follow_simulated_hosts(pool: Pool) -> None:
    hosts = ("a", "b", "a", "b")
    expected = [(0, 2, hosts), (0, 2, hosts), (1, 2, hosts), (1, 2, hosts)]
    assert pool.run(4, read_local) == expected


# ---- torch process groups ----------------------------------------------------------


def sum_ranks(rank: int, config: dict[str, Any]) -> dict[str, tuple[float, list[int]]]:
    smp.init(config)
    result = {}
    for kind in KINDS:
        group = getattr(smp, f"get_{kind}_process_group")()
        value = torch.tensor(float(2**rank))
        dist.all_reduce(value, group=group)
        result[kind] = (float(value), dist.get_process_group_ranks(group))
    return result


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    "config",
    [
        {"partitions": 2, "ddp": True, "context_parallel_degree": 2},
        {"ddp": True, "context_parallel_degree": 2},
        {"partitions": 2, "ddp": True},
        {"ddp": True},
    ],
)
def test_process_groups_reduce_over_the_listed_ranks(pool: Pool, config: dict[str, Any]) -> None:
    cp = config.get("context_parallel_degree", 1)
    grid = _C.ProcessGrid(4, config.get("partitions", 1), 1, cp, "cluster")
    for rank, sums in enumerate(pool.run(4, sum_ranks, config)):
        for kind in KINDS:
            members = grid.group(kind, rank)
            assert sums[kind] == (float(sum(2**r for r in members)), members)


def groups_of_one(rank: int) -> float:
    smp.init({"ddp": True})
    threads = threading.active_count()
    assert not dist.is_initialized()  # torch's groups are made at their first use
    value = torch.tensor(3.0)
    dist.all_reduce(value, group=smp.get_dp_process_group())
    smp.shutdown()
    assert not dist.is_initialized()
    assert threading.active_count() == threads
    return float(value)


def test_world_of_one_makes_process_groups_on_demand(pool: Pool) -> None:
    assert pool.run(1, groups_of_one) == [3.0]


def ask_without_ddp(rank: int) -> str:
    smp.init({"partitions": 2})
    with pytest.raises(RuntimeError, match="needs the configuration key ddp") as error:
        smp.get_dp_process_group()
    return str(error.value)


def test_process_groups_need_ddp(pool: Pool) -> None:
    texts = pool.run(2, ask_without_ddp)
    assert texts[1].startswith("[global_rank 1 | pp 1 tp 0 rdp 0] ")


def keep_own_torch_groups(rank: int) -> bool:
    store = dist.FileStore(os.environ["SMP_RENDEZVOUS"].removeprefix("file://") + "own", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    smp.init({"ddp": True})
    value = torch.ones(1)
    dist.all_reduce(value, group=smp.get_dp_process_group())
    smp.shutdown()
    alive = dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
    return alive and float(value) == 2.0


def test_process_group_of_the_user_is_used_and_left_alone(pool: Pool) -> None:
    assert pool.run(2, keep_own_torch_groups) == [True, True]


# ---- communicators, with tensor parallelism ----------------------------------------


def build_with_tp(rank: int, placement: str) -> dict[str, float]:
    """Groups of a grid with tp 2, which init does not offer yet."""
    grid = _C.ProcessGrid(4, 1, 2, 1, placement)
    launch = read_launch(os.environ, "here")
    store = MeetingPoint().open(launch, os.environ, 30.0)
    board = _C.FaultBoard(rank)
    made = groups.build_groups(
        grid,
        rank,
        store,
        groups.over_gloo(store, rank, loopback=True, timeout_s=PATIENCE_S),
        shard_size=2,
        device=torch.device("cpu"),
        board=board,
        machine="here",
        shared_memory=True,
        timeout_s=PATIENCE_S,
    )
    torch_groups = TorchGroups(
        grid,
        rank,
        shard_size=2,
        device=torch.device("cpu"),
        loopback=True,
        timeout_s=PATIENCE_S,
    )
    torch_groups.make(store)
    assert made.replica is None
    sums = {}
    communicators = {
        "dp": made.dp_cp,
        "dp_control": made.dp_cp_control,
        "mp": made.mp,
        "shard": made.shard,
        "shard_reduce": made.shard_reduce,
    }
    for name, comm in communicators.items():
        assert comm is not None
        value = torch.tensor([float(2**rank)])
        comm.all_reduce(value).wait(PATIENCE_S)
        sums[name] = float(value)
    for kind in ("tp", "rdp", "shard"):
        value = torch.tensor(float(2**rank))
        dist.all_reduce(value, group=torch_groups[kind])
        sums[kind] = float(value)
    dist.barrier()
    torch_groups.destroy()
    assert not dist.is_initialized()
    return sums


@pytest.mark.parametrize("placement", ["DPT", "TPD"])
def test_groups_with_tensor_parallelism_reduce_over_the_grid(pool: Pool, placement: str) -> None:
    grid = _C.ProcessGrid(4, 1, 2, 1, placement)
    for rank, sums in enumerate(pool.run(4, build_with_tp, placement)):
        for name, total in sums.items():
            kind = "rdp" if name.startswith("shard") else name.removesuffix("_control")
            assert total == sum(2**r for r in grid.group(kind, rank)), name


def test_shard_groups_are_neighbours_and_replicas_have_equal_places() -> None:
    grid = _C.ProcessGrid(16, 1, 2, 1, "cluster")
    own = [groups.own_groups(grid, rank, 2) for rank in range(16)]
    for rank in range(16):
        rdp = own[rank]["rdp"]
        place = rdp.index(rank)
        assert own[rank]["shard"] == rdp[place - place % 2 :][:2]
        assert own[rank]["replica"] == rdp[place % 2 :: 2]


def read_context_group(rank: int) -> dict[str, Any]:
    smp.init({"context_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True})
    own = runtime.current().rank
    comms = own.comms
    group, tp = comms.cp_group, comms.tp_group
    assert comms.cp is not None and comms.tp is not None and comms.dp_cp is not None
    assert comms.cp is not comms.tp
    parts = group.gather(torch.tensor([float(rank)]), 0)
    smp.cp_barrier()
    return {
        "cp": (group.group_rank, group.size, parts.tolist()),
        "tp": (tp.group_rank, tp.size, tp.gather(torch.tensor([float(rank)]), 0).tolist()),
        "order": own.groups["tp_cp"],
        "parameters": (own.groups["dp_cp"], own.groups["rdp_cp"], comms.dp_cp.size),
        "objects": smp.allgather(rank, smp.CommGroup.RDP_CP_GROUP),
    }


def test_context_ranks_have_a_group_of_their_own(pool: Pool) -> None:
    for rank, seen in enumerate(pool.run(4, read_context_group)):
        tp, cp = rank % 2, rank // 2
        assert seen["cp"] == (cp, 2, [float(tp), float(tp + 2)])
        assert seen["tp"] == (tp, 2, [2.0 * cp, 2.0 * cp + 1])
        assert seen["order"] == (0, 1, 2, 3)
        assert seen["parameters"] == ((0, 1, 2, 3), (tp, tp + 2), 4)
        assert seen["objects"] == [tp, tp + 2]


def read_groups_without_context_ranks(rank: int) -> tuple[bool, bool, int, int]:
    smp.init({"ddp": True})
    own = runtime.current().rank
    same = all(own.groups[k] == own.groups[f"{k}_cp"] for k in ("dp", "rdp", "tp"))
    comms = own.comms
    return same, comms.cp is comms.cp_control is None, comms.cp_group.size, smp.cp_size()


def test_without_them_no_communicator_is_made_twice(pool: Pool) -> None:
    assert pool.run(2, read_groups_without_context_ranks) == [(True, True, 1, 1)] * 2


# ---- start and end -----------------------------------------------------------------


def change_layouts(rank: int) -> list[tuple[int, int]]:
    before = thread_names()
    seen = []
    for config in ({"partitions": 2}, {"ddp": True}, {"partitions": 2, "ddp": True}):
        smp.init(config)
        smp.barrier()
        seen.append((smp.pp_rank(), smp.dp_rank()))
        smp.shutdown()
        smp.shutdown()
        assert not smp.is_initialized()
        assert smp.state.cfg is None
        wait_for_threads_to_go(before)
        assert _C.rank_prefix() == ""
    return seen


def test_another_layout_may_follow_and_nothing_keeps_running(pool: Pool) -> None:
    assert pool.run(2, change_layouts) == [[(0, 0), (0, 0), (0, 0)], [(1, 0), (0, 1), (1, 0)]]


def add_keys(rank: int) -> tuple[int, bool, float]:
    smp.init({"partitions": 2, "microbatches": 2})
    smp.init()
    smp.init({"microbatches": 8, "ddp": True})
    value = torch.ones(1)
    dist.all_reduce(value, group=smp.get_mp_process_group())
    cfg = smp.state.cfg
    assert cfg is not None
    assert cfg.active_microbatches == 4
    return cfg.microbatches, cfg.ddp, float(value)


def test_later_init_adds_keys_and_groups(pool: Pool) -> None:
    assert pool.run(2, add_keys) == [(8, True, 2.0)] * 2


def listen_addresses(rank: int) -> set[str]:
    """Local addresses of all listening TCP sockets of this process."""
    smp.init({"partitions": 2, "ddp": True})
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            for line in file.readlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and columns[9] in inodes:
                    addresses.add(columns[1].split(":")[0])
    smp.barrier()
    return addresses


def test_ranks_of_one_host_listen_on_loopback_only(pool: Pool) -> None:
    loopback = {"0100007F", "00000000000000000000000001000000"}
    for addresses in pool.run(4, listen_addresses):
        assert addresses
        assert addresses <= loopback


def connect_as_machines(rank: int) -> tuple[list[int], float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "machine_id", lambda hostname: f"machine {rank}")
        smp.init({"partitions": 2, "ddp": True})
    value = torch.ones(1)
    dist.all_reduce(value, group=smp.get_world_process_group())
    return smp.allgather(rank, smp.WORLD), float(value)


def test_ranks_of_several_machines_meet_at_the_address_of_rank_0(pool: Pool) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    results = pool.run(4, connect_as_machines, env=env)
    assert results == [([0, 1, 2, 3], 4.0)] * 4
