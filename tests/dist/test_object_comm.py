"""Objects between ranks: send, broadcast, allgather, barrier, and their misuse."""

from __future__ import annotations

import collections
import os
import sys
from typing import Any

import pytest
import torch

import smp
from smp.world import runtime
from tests.dist.pool import Pool

DDP_2x2 = {"partitions": 2, "ddp": True}  # dp groups 02 13, mp groups 01 23


class Special(dict):  # type: ignore[type-arg]
    pass


def pass_objects(rank: int) -> list[Any]:
    smp.init(DDP_2x2)
    received: list[Any] = []
    if smp.dp_rank() == 0:
        smp.send({"from": rank}, 1, smp.RankType.DP_RANK)
        smp.send(torch.arange(3), 1, smp.RankType.DP_RANK)
    else:
        received.append(smp.recv_from(0, smp.RankType.DP_RANK))
        received.append(smp.recv_from(0, smp.RankType.DP_RANK).tolist())
    if rank == 3:
        smp.broadcast(Special(x=collections.OrderedDict(a=1)), smp.WORLD)
    else:
        obj = smp.recv_from(3, smp.RankType.WORLD_RANK)
        received.append((type(obj).__name__, type(obj["x"]).__name__))
    return received


def test_send_and_broadcast_count_ranks_in_the_named_group(pool: Pool) -> None:
    classes = ("Special", "OrderedDict")
    assert pool.run(4, pass_objects) == [
        [classes],
        [classes],
        [{"from": 0}, [0, 1, 2], classes],
        [{"from": 1}, [0, 1, 2]],
    ]


def pass_large_tensors(rank: int) -> list[float]:
    """The sender overwrites what it has sent, and the receiver what has come."""
    smp.init({"ddp": True})
    received = []
    for number in range(6):
        large = torch.full((1 << 20,), float(number))
        if rank == 1:
            came = smp.recv_from(0, smp.RankType.WORLD_RANK)["large"]
            smp.barrier()
            received += came.unique().tolist()
            came.fill_(-2.0)
        elif number % 2:
            smp.send({"large": large}, 1, smp.RankType.WORLD_RANK)
        else:
            smp.broadcast({"large": large}, smp.WORLD)
        if rank == 0:
            large.fill_(-1.0)
            smp.barrier()
            received += large.unique().tolist()
    return received


def test_large_tensors_are_those_of_the_call_and_belong_to_the_receiver(pool: Pool) -> None:
    assert pool.run(2, pass_large_tensors) == [[-1.0] * 6, [float(n) for n in range(6)]]


def gather_everywhere(rank: int) -> dict[str, list[int]]:
    smp.init(DDP_2x2)
    return {group.name: smp.allgather(rank, group) for group in smp.CommGroup}


def test_allgather_is_ordered_by_group_rank(pool: Pool) -> None:
    for rank, seen in enumerate(pool.run(4, gather_everywhere)):
        assert seen["WORLD"] == [0, 1, 2, 3]
        assert seen["MP_GROUP"] == seen["PP_GROUP"] == [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
        assert seen["DP_GROUP"] == seen["RDP_GROUP"] == [rank % 2, rank % 2 + 2]
        assert seen["TP_GROUP"] == [rank]


def pass_in_turn(rank: int) -> str:
    """Ranks 2 and 3 come to their barrier when the other group is behind its own."""
    smp.init(DDP_2x2)
    if smp.rdp_rank() == 0:
        smp.mp_barrier()
        smp.send("behind it", 1, smp.RankType.RDP_RANK)
        return ""
    told: str = smp.recv_from(0, smp.RankType.RDP_RANK)
    smp.mp_barrier()
    return told


def test_barrier_waits_for_the_own_group_only(pool: Pool) -> None:
    assert pool.run(4, pass_in_turn) == ["", "", "behind it", "behind it"]


def misuse(rank: int) -> None:
    smp.init(DDP_2x2)
    with pytest.raises(ValueError, match="CommGroup"):
        smp.barrier("world")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RankType"):
        smp.send(1, 0, smp.DP_GROUP)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="DP_RANK 2 does not exist"):
        smp.send(1, 2, smp.RankType.DP_RANK)
    smp.barrier()


def test_misuse_is_refused_before_anything_is_sent(pool: Pool) -> None:
    pool.run(4, misuse)


def alone(rank: int) -> list[Any]:
    smp.init({})
    smp.broadcast("nobody", smp.WORLD)
    smp.barrier()
    smp.dp_barrier()
    with pytest.raises(ValueError, match="only process"):
        smp.send(1, 0, smp.RankType.WORLD_RANK)
    return smp.allgather({"a": 1}, smp.WORLD)


def test_world_of_one_returns_at_once(pool: Pool) -> None:
    assert pool.run(1, alone) == [[{"a": 1}]]


def fork_and_ask(rank: int) -> int:
    smp.init({"partitions": 2})
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert (smp.rank(), smp.pp_rank(), smp.size()) == (rank, rank, 2)
            with pytest.raises(RuntimeError, match="forked"):
                smp.barrier()
            with pytest.raises(RuntimeError, match="forked"):
                smp.init({"partitions": 2})
            smp.shutdown()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    smp.barrier()  # the child has not disturbed us
    return os.waitstatus_to_exitcode(status)


def test_forked_child_reads_ranks_and_may_not_communicate(pool: Pool) -> None:
    assert pool.run(2, fork_and_ask) == [0, 0]


def peer_raises(rank: int) -> str:
    smp.init({"partitions": 2})
    if rank == 1:
        with runtime.current().rank.reporting("a test"):
            raise KeyError("broken on purpose")
    with pytest.raises(smp.PeerFailure) as error:
        smp.recv_from(1, smp.RankType.WORLD_RANK)
    return str(error.value)


def test_exception_of_a_peer_ends_a_wait_and_names_it(pool: Pool) -> None:
    outcomes = pool.outcomes(2, peer_raises)
    assert outcomes[1].error == "KeyError"
    assert outcomes[0].error is None, outcomes[0].traceback
    for words in ("rank 1", "pp 1 tp 0 rdp 0", "a test", "broken on purpose"):
        assert words in outcomes[0].value


def peer_leaves(rank: int) -> str:
    smp.init({"partitions": 2})
    if rank == 1:
        return ""  # shutdown follows
    with pytest.raises(smp.PeerFailure) as error:
        smp.recv_from(1, smp.RankType.WORLD_RANK)
    return str(error.value)


def test_wait_for_a_rank_that_said_goodbye_fails(pool: Pool) -> None:
    assert "rank 1" in pool.run(2, peer_leaves)[0]
