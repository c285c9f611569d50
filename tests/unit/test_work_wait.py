"""A wait of a script for an operation of a group hears of what happens to other ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import smp._C as _C
from tests.patience import PATIENCE_S

SECRET = b"a secret that only these tests know"
N = 2


class Ranks:
    """Two ranks in this process: boards, liveness, and a group over sockets."""

    def __init__(self) -> None:
        self.hub = _C.LivenessHub(N, address="127.0.0.1", secret=SECRET)
        self.boards = [_C.FaultBoard(rank) for rank in range(N)]
        self.clients = [
            _C.LivenessClient(
                "127.0.0.1", self.hub.port, secret=SECRET, global_rank=rank, board=self.boards[rank]
            )
            for rank in range(N)
        ]
        self.sockets = [
            _C.PeerSockets(rank, address="127.0.0.1", secret=SECRET, world_size=N)
            for rank in range(N)
        ]
        addresses = [one.address for one in self.sockets]
        self.groups = []
        for rank in range(N):
            self.sockets[rank].set_addresses(addresses)
            group = _C.make_socket_communicator(self.sockets[rank], "dp", list(range(N)))
            self.groups.append(_C.watch_collectives(group, self.boards[rank], list(range(N))))

    def end(self) -> None:
        for group in self.groups:
            group.abort()
        for one in (*self.sockets, *self.clients, self.hub):
            one.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end()


def test_a_wait_ends_with_the_failure_of_another_rank(ranks: Ranks) -> None:
    sum_of_both = ranks.groups[0].all_reduce(torch.ones(8))
    message = ranks.groups[0].recv(torch.ones(8), 1)
    ranks.clients[1].report_raised("a layer", "on purpose")
    for work in (sum_of_both, message):
        with pytest.raises(_C.PeerFailure, match="global_rank 1 raised in a layer: on purpose"):
            work.wait(PATIENCE_S)


def test_a_wait_ends_with_the_death_of_another_rank(ranks: Ranks) -> None:
    work = ranks.groups[0].all_reduce(torch.ones(8))
    ranks.clients[1].close()  # without a goodbye
    with pytest.raises(_C.PeerFailure, match="global_rank 1 died"):
        work.wait(PATIENCE_S)


def test_a_wait_without_failures_ends_by_its_own_limit(ranks: Ranks) -> None:
    work = ranks.groups[0].all_reduce(value := torch.ones(8))
    late = r"all_reduce over .*dp \(2 ranks\): timed out after 300 ms"
    with pytest.raises(RuntimeError, match=late):
        work.wait(0.3)
    assert ranks.boards[0].activity()["blocked"] is False
    other = ranks.groups[1].all_reduce(torch.ones(8))
    work.wait(PATIENCE_S)  # it may be waited for again
    other.wait(PATIENCE_S)
    assert value.tolist() == [2.0] * 8
