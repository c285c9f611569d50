"""Traffic between hosts when gradients are summed by hosts, and the time that this takes.

Correctness on many layouts is a matter of `tests/dist/test_host_sums.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.dist import training
from tests.dist.pool import Pool
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import TRANSPORTS, HostRanks
from tests.hosts.test_faults import FOREVER, SCRIPT, check_ended, check_trained, wait_for_step
from tests.hosts.test_hosts import check_bytes
from tests.hosts.traffic import Measured, Summed, sum_replicas, train_shards

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SUM_BYTES = 16 << 20
LAYOUTS = [(2, 2), (2, 4), (4, 2)]


def first_ranks(results: Sequence[Any], per_host: int) -> list[Any]:
    """Returns the result of the first rank of each host."""
    return list(results[::per_host])


def share_of_a_ring(size: int) -> float:
    """Bytes that one place of a ring sends for a sum, as a part of those of the tensor."""
    return 2 * (size - 1) / size


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("hosts", "per_host"), LAYOUTS)
def test_a_sum_crosses_as_if_each_host_had_one_rank(
    pool: Pool, hosts: int, per_host: int, transport: str
) -> None:
    with Network(hosts) as network:
        ranks = HostRanks(network, pool, per_host, transport)
        summed: dict[str, list[Summed]] = {
            backend: first_ranks(
                ranks.run(hosts * per_host, sum_replicas, backend, SUM_BYTES, 2), per_host
            )
            for backend in ("hierarchical", "flat")
        }
    for backend, members in (("hierarchical", hosts), ("flat", hosts * per_host)):
        expected = int(2 * SUM_BYTES * share_of_a_ring(members))
        for index, host in enumerate(summed[backend]):
            assert host.by_hosts == ({"dp": (hosts, per_host)} if members == hosts else {})
            check_bytes(host.measured.across.sent, expected, f"{backend}: sent by host{index}")
            inside = 0 if members == hosts else (per_host - 1) * expected
            check_bytes(host.measured.inside.sent, inside, f"{backend}: inside host{index}")


WIDTH = 1024
STATE_BYTES = 2 * WIDTH * WIDTH * 4


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(("hosts", "per_host"), LAYOUTS)
@pytest.mark.parametrize("kind", ["copies", "one_copy", "optimizer"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shards_cross_as_little_as_can_be(
    pool: Pool, hosts: int, per_host: int, kind: str, transport: str
) -> None:
    """A copy of the state in each host: parameters never cross, gradients once, for their sum."""
    size = hosts * per_host
    keys = {
        "copies": {"sharded_data_parallel_degree": per_host},
        "one_copy": {"sharded_data_parallel_degree": size},
        "optimizer": {"shard_optimizer_state": True},
    }[kind]
    with Network(hosts) as network:
        ranks = HostRanks(network, pool, per_host, transport)
        results: list[tuple[Measured, int]] = ranks.run(size, train_shards, keys, WIDTH)
    # Copies are summed, one copy is scattered and then gathered.
    once = STATE_BYTES * (hosts - 1) // hosts
    expected = 2 * once if kind == "copies" else once
    for index, (measured, gathered_bytes) in enumerate(first_ranks(results, per_host)):
        assert (gathered_bytes >= STATE_BYTES) == (kind != "optimizer")
        crossing = {"copies": 0, "one_copy": gathered_bytes, "optimizer": STATE_BYTES}[kind]
        check_bytes(
            measured.across.sent,
            expected + crossing * (hosts - 1) // hosts,
            f"{kind}: sent by host{index}",
        )


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_by_hosts_equals_one_process(
    pool: Pool, hosts: int, per_host: int, transport: str
) -> None:
    run = training.Run("gpt2", 1, hosts * per_host)
    by_hosts = replace(run, config=(("ddp_dist_backend", "hierarchical"),))
    with Network(hosts) as network:
        training.check_runs(HostRanks(network, pool, per_host, transport), [by_hosts])


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(("hosts", "per_host"), LAYOUTS)
def test_by_hosts_is_faster_on_a_network_of_1_gbit(pool: Pool, hosts: int, per_host: int) -> None:
    """`benchmarks/hosts.py` measures how much on an idle machine."""
    num_bytes, size = 32 << 20, hosts * per_host
    with Network(hosts, mbit=1000.0) as network:
        ranks = HostRanks(network, pool, per_host)
        took_s = {}
        for backend in ("hierarchical", "flat"):
            results: list[Summed] = ranks.run(size, sum_replicas, backend, num_bytes, 3)
            slowest = [max(times) for times in zip(*(r.seconds for r in results), strict=True)]
            took_s[backend] = min(slowest)
    bound_s = num_bytes * share_of_a_ring(hosts) * 8 / 1e9
    print(f"{hosts} x {per_host}: {took_s}, bound {bound_s:.3f} s")
    assert took_s["hierarchical"] > 0.9 * bound_s, "the link is faster than it should be"
    assert took_s["hierarchical"] < took_s["flat"]


# ---- faults ------------------------------------------------------------------


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("fault", ["cut", "silence"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_host_that_is_gone_ends_the_job(pool: Pool, fault: str, transport: str) -> None:
    """Faults the host in the middle of sums, or between them."""
    with Network(2) as network:
        ranks = HostRanks(network, pool, 2, transport)
        started = ranks.start_script(SCRIPT, ["1", str(FOREVER)])
        wait_for_step(started, 5)
        getattr(network, fault)(1)
        results = ranks.wait(started)
    check_ended(results, {0: {"host1"}, 1: {"host1"}, 2: {"host0"}, 3: {"host0"}})


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pause_s", [2.0])
def test_a_cable_that_is_put_back_changes_no_number(pool: Pool, pause_s: float) -> None:
    steps = 200
    with Network(2) as network:
        ranks = HostRanks(network, pool, 2)
        started = ranks.start_script(SCRIPT, ["1", str(steps)])
        wait_for_step(started, 5)
        network.cut(1)
        seen = (started.folder / "rank0.log").read_text()
        assert "LOSSES" not in seen, "the job is over before the fault"
        time.sleep(pause_s)
        network.mend(1)
        results = ranks.wait(started)
    check_trained(results, steps)
