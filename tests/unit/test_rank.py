"""A process's own rank and place, and messages that one rank writes for all."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smp
from smp import _C
from smp.config.sources import read_config
from smp.world import runtime
from smp.world.groups import Groups
from smp.world.launch import read_launch
from smp.world.log import FirstRankLog
from smp.world.rank import Rank
from smp.world.settings import read_settings
from tests.patience import PATIENCE_S


@pytest.fixture
def prefix() -> Iterator[None]:
    yield
    _C.set_rank_prefix("")


def rank_of_four(global_rank: int) -> Rank:
    read = read_config({"partitions": 2, "ddp": True}, {}, {}, 4)
    launch = replace(
        read_launch({}, "here"), global_rank=global_rank, world_size=4, local_rank=global_rank
    )
    return Rank(read, launch, read_settings({}), torch.device("cpu"))


def test_places_are_known_without_a_run_and_without_others(prefix: None) -> None:
    rank = rank_of_four(3)
    assert not smp.is_initialized()
    assert (rank.global_rank, rank.world_size) == (3, 4)
    assert rank.sizes["pp"] == 2 and rank.sizes["dp"] == 2
    assert rank.groups["pp"][rank.ranks["pp"]] == rank.groups["dp"][rank.ranks["dp"]] == 3
    assert rank.prefix == f"[global_rank 3 | {rank.place}] "
    assert (rank.connections, rank.board, rank.exchange) == (None, None, None)


def _group_of_one(name: str) -> _C.Communicator:
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=PATIENCE_S))
    return _C.make_c10d_communicator(backend, name)


@pytest.mark.parametrize(("is_healthy", "end"), [(True, "shut_down"), (False, "abort")])
def test_groups_end_in_one_order_unless_a_rank_has_failed(
    is_healthy: bool, end: str, monkeypatch: pytest.MonkeyPatch, prefix: None
) -> None:
    ended: list[tuple[str, str]] = []
    for call in ("shut_down", "abort"):
        monkeypatch.setattr(
            _C.Communicator, call, lambda self, call=call: ended.append((call, self.name))
        )
    rank = rank_of_four(0)
    connections: Any = SimpleNamespace(is_healthy=is_healthy)
    rank.connections = connections
    tp = _group_of_one("tp")
    # Not in the order in which the groups are made.
    rank.comms = Groups(
        tp=tp, tp_control=tp, rdp_cp=_group_of_one("rdp"), dp_cp=_group_of_one("dp")
    )
    rank.drop_communicators()
    names = [name for call, name in ended if call == end]
    assert list(dict.fromkeys(names)) == ["dp", "rdp", "tp"]
    assert len(ended) == len(names)
    assert not is_healthy or len(names) == 3
    assert rank.comms.made == []


def test_copies_and_pickles_of_an_optimizer_have_the_rank_of_their_process(
    running: None,
) -> None:
    model = nn.Linear(2, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied is not optimizer
        assert copied._rank is runtime.current().rank and copied._runtime is runtime.current()


def test_who_outlives_its_run_is_told_so() -> None:
    smp.init({})
    rank = runtime.current().rank
    smp.shutdown()
    with pytest.raises(RuntimeError, match="that smp.shutdown has ended"):
        rank.check_process("smp.something")


def test_one_rank_speaks_for_all(caplog: pytest.LogCaptureFixture) -> None:
    log = FirstRankLog()
    with caplog.at_level(logging.WARNING, "smp"):
        log.warning("before")
        log.begin(1)
        log.warning("on the second")
        log.begin(0)
        log.warning("on the first")
        log.begin(None)
        log.warning("after")
    assert [record.getMessage() for record in caplog.records] == ["before", "on the first", "after"]
    assert {record.name for record in caplog.records} == {"smp"}


def test_what_is_told_once_is_new_again_in_the_next_run() -> None:
    log = FirstRankLog()
    log.begin(0)
    assert log.is_new("a") and not log.is_new("a") and log.is_new("b")
    log.begin(0)
    assert log.is_new("a")
