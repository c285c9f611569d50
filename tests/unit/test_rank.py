"""A process's own rank and place, and messages that one rank writes for all."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import smp
from smp import _C
from smp.config.sources import read_config
from smp.world import runtime
from smp.world.launch import read_launch
from smp.world.log import FirstRankLog
from smp.world.rank import Rank
from smp.world.settings import read_settings


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
