"""Gradients that are summed host by host equal one process, on hosts that are only names.

Real hosts, and what crosses between them, are those of `tests/hosts`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import smp
from smp.world import runtime
from tests.dist import sharded_training, training
from tests.dist.pool import Pool, RankFailure
from tests.dist.sharded_training import check_equal, sharded
from tests.dist.training import Run

ByHosts = dict[str, tuple[int, int]]


@contextmanager
def host_named(name: str) -> Iterator[None]:
    os.environ["SMP_HOSTNAME"] = name
    try:
        yield
    finally:
        del os.environ["SMP_HOSTNAME"]


def by_hosts() -> ByHosts:
    return runtime.current().rank.comms.by_hosts


def train_whole(rank: int, hosts: str, runs: list[Run]) -> list[tuple[Any, ByHosts]]:
    results = []
    for run in runs:
        with host_named(hosts[rank]):
            results.append((training.train(rank, run), by_hosts()))
            smp.shutdown()
    return results


def with_backend(run: Run, backend: str) -> Run:
    return Run(**{**vars(run), "config": (*run.config, ("ddp_dist_backend", backend))})


# Host of each rank, the run, and the groups that sum by hosts.
WHOLE = [
    ("aabb", Run("gpt2", 1, 4), {"dp": (2, 2)}),
    ("abab", Run("reuse", 1, 4), {"dp": (2, 2)}),
    ("aaaabbbb", Run("reuse", 2, 4), {"dp": (2, 2)}),
    ("aabbccdd", Run("chain", 1, 8), {"dp": (4, 2)}),
    # Nothing to gain: one host, one rank on each, or an odd one.
    ("aaaa", Run("chain", 1, 4), {}),
    ("abcd", Run("chain", 1, 4), {}),
    ("aaab", Run("chain", 1, 4), {}),
]


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("transport", ["gloo", "tcp"])
@pytest.mark.parametrize(("hosts", "run", "expected"), WHOLE, ids=[h for h, _, _ in WHOLE])
def test_sums_by_hosts_equal_one_process(
    pool: Pool, transport: str, hosts: str, run: Run, expected: ByHosts
) -> None:
    runs = [run, with_backend(run, "flat")]
    results = pool.run(len(hosts), train_whole, hosts, runs, env={"SMP_TRANSPORT": transport})
    for index, groups in enumerate((expected, {})):
        assert all(rank[index][1] == groups for rank in results)
        training.check_against_reference([rank[index][0] for rank in results], runs[index])


@pytest.mark.parametrize("shared", ["1", "0"])
def test_sums_within_a_host_need_no_shared_memory(pool: Pool, shared: str) -> None:
    run = Run("gpt2", 1, 4, microbatches=2)
    results = pool.run(4, train_whole, "aabb", [run], env={"SMP_SHM": shared})
    assert all(groups == {"dp": (2, 2)} for [(_, groups)] in results)
    training.check_against_reference([record for [(record, _)] in results], run)


def train_twice(rank: int, run: Run) -> list[torch.Tensor]:
    """Trains twice, checks that all gradients are equal, and returns them.

    The runs are in float32, where a gradient shows the order of a sum.
    """
    [(first, _), (second, _)] = train_whole(rank, "aabb", [run, run])
    assert first.losses == second.losses
    for record in (first, second):
        record.grads[-1] = {n: g for n, g in record.grads[-1].items() if g is not None}
    for name, gradient in first.grads[-1].items():
        assert torch.equal(gradient, second.grads[-1][name]), f"{name} differs between two runs"
    return list(first.grads[-1].values())


def test_two_runs_give_the_same_bits(pool: Pool) -> None:
    ranks = pool.run(4, train_twice, Run("gpt2", 1, 4, dtype=torch.float32))
    assert len(ranks[0]) > 10 and all(float(g.abs().max()) > 0 for g in ranks[0])
    for gradients in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, ranks[0], strict=True))


# ---- shards ------------------------------------------------------------------


def train_sharded(rank: int, hosts: str, runs: list[Run]) -> list[tuple[Any, ByHosts]]:
    results = []
    for run in runs:
        with host_named(hosts[rank]):
            results.append((sharded_training.train(rank, run), by_hosts()))
            smp.shutdown()
    return results


# Ranks that hold one copy together, and which groups sum by hosts.
SHARDED = [
    ("aabb", 4, {"dp": (2, 2), "shard": (2, 2), "shard_reduce": (2, 2)}),
    ("aabb", 2, {"dp": (2, 2)}),
    ("aaaabbbb", 2, {"dp": (2, 4), "replica": (2, 2)}),
]


@pytest.mark.parametrize(("hosts", "degree", "expected"), SHARDED)
def test_shards_on_several_hosts_equal_whole_replicas(
    pool: Pool, hosts: str, degree: int, expected: ByHosts
) -> None:
    plain = Run("gpt2", 1, len(hosts), microbatches=1, steps=4)
    runs = [plain, sharded(plain, degree)]
    results = pool.run(len(hosts), train_sharded, hosts, runs)
    assert all(rank[1][1] == expected for rank in results)
    whole, parts = ([rank[index][0] for rank in results] for index in (0, 1))
    check_equal(parts, whole, 1e-9)


def test_shared_optimizer_state_on_several_hosts_equals_one_process(pool: Pool) -> None:
    run = Run("gpt2", 1, 4, config=(("shard_optimizer_state", True),))
    plain = Run("gpt2", 1, 4)
    results = pool.run(4, train_whole, "aabb", [run, plain])
    for (record, groups), (expected, _) in results:
        assert groups == {"dp": (2, 2), "shard": (2, 2), "shard_reduce": (2, 2)}
        losses = (torch.tensor(record.losses), torch.tensor(expected.losses))
        torch.testing.assert_close(*losses, rtol=0, atol=1e-9)
        for name, value in expected.params.items():
            torch.testing.assert_close(record.params[name], value, rtol=0, atol=1e-9)


# ---- what cannot be ----------------------------------------------------------


def init_on(rank: int, hosts: str, config: dict[str, Any]) -> ByHosts:
    with host_named(hosts[rank]):
        smp.init({"ddp": True, **config})
        return by_hosts()


@pytest.mark.parametrize(
    ("hosts", "config", "words"),
    [
        ("aa", {}, "all of its 2 ranks are on host a"),
        ("ab", {}, "each of its 2 hosts has one rank"),
        ("aab", {}, "host a has 2 of its ranks and host b has 1"),
        ("aabb", {"partitions": 2, "placement_strategy": "spread"}, "global ranks [0, 1] cannot"),
    ],
)
def test_hierarchical_is_refused_by_name_where_it_cannot_be(
    pool: Pool, hosts: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(len(hosts), init_on, hosts, {**config, "ddp_dist_backend": "hierarchical"})
    text = str(failure.value)
    assert "smp config: ddp_dist_backend='hierarchical': the data-parallel group" in text
    assert words in text and "use 'auto'" in text, text


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("auto", {"dp": (2, 2)}), ("hierarchical", {"dp": (2, 2)}), ("flat", {}), ("nccl", {})],
)
def test_the_key_says_how(pool: Pool, backend: str, expected: ByHosts) -> None:
    assert pool.run(4, init_on, "aabb", {"ddp_dist_backend": backend}) == [expected] * 4


def init_alone(rank: int) -> None:
    smp.init({"ddp_dist_backend": "hierarchical"})


def test_one_process_cannot_sum_by_hosts(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="ddp_dist_backend='hierarchical'"):
        pool.run(1, init_alone)


def init_twice(rank: int) -> str:
    smp.init({"ddp": True})
    with pytest.raises(ValueError, match="already initialized with 'auto'") as error:
        smp.init({"ddp": True, "ddp_dist_backend": "flat"})
    return str(error.value)


def test_a_later_init_cannot_change_it(pool: Pool) -> None:
    for text in pool.run(2, init_twice):
        assert "ddp_dist_backend='flat'" in text
