"""Faults of a network: a job goes on with the numbers of one process, or all ranks end within 30 s
and say why.
"""

from __future__ import annotations

import json
import re
import time

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.processes import Ended
from tests.dist.zygote import MONOTONIC_VARIABLE
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import REPO, HostRanks
from tests.hosts.train_on import CASE
from tests.reference.single_process import train_reference

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SCRIPT = REPO / "tests" / "hosts" / "train_on.py"
WORST_S = 30.0


def check_trained(results: list[Ended], steps: int) -> None:
    """The losses are those of one process."""
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        found = re.search(r"^LOSSES (.*)$", result.output, re.MULTILINE)
        assert not result.hung and result.returncode == 0 and found, text
        seen = json.loads(found[1])
        num_replicas = 1 + max(
            json.loads(m)["dp_rank"]
            for other in results
            for m in re.findall(r"^LOSSES (.*)$", other.output, re.MULTILINE)
        )
        reference = train_reference(CASE, torch.float64, num_replicas, 4, steps)
        expected = [loss for step in reference.losses for loss in step[seen["dp_rank"]]]
        assert torch.allclose(
            torch.tensor(seen["losses"]), torch.tensor(expected), rtol=1e-9, atol=0
        ), text


# ---- faults that pass ----------------------------------------------------------


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("how", [{"latency_ms": 100.0}, {"loss_percent": 1.0}], ids=str)
def test_late_and_lost_packets_change_no_number(pool: Pool, how: dict[str, float], pp: int) -> None:
    """100 ms one way: an answer takes 200."""
    with Network(2, **how) as network:  # type: ignore[arg-type]
        steps = 2 if "latency_ms" in how else 20
        results = HostRanks(network, pool).run_script(SCRIPT, [str(pp), str(steps)], timeout=150)
        if "loss_percent" in how:
            assert network.num_lost > 5
    check_trained(results, steps)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [1, 2])
def test_clocks_that_count_from_another_boot_change_no_number(pool: Pool, pp: int) -> None:
    """CLOCK_MONOTONIC, by which the library waits. The wall clock is one for all namespaces."""
    with Network(2) as network:
        results = HostRanks(network, pool).run_script(
            SCRIPT, [str(pp), "5"], env_of=lambda rank: {MONOTONIC_VARIABLE: str(rank * 1_000_000)}
        )
    check_trained(results, 5)


# ---- faults at the begin -------------------------------------------------------


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(("one", "other"), [(1, 2)])
def test_hosts_that_do_not_reach_each_other_are_refused(pool: Pool, one: int, other: int) -> None:
    with Network(3) as network:
        network.part(one, other)
        began_s = time.monotonic()
        results = HostRanks(network, pool).run_script(SCRIPT, ["1", "3"])
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        assert result.time - began_s < WORST_S, text
        assert f"host 'host{one}' at 10.231.0.{one + 1}" in result.output, text
        assert f"does not reach host 'host{other}'" in result.output, text


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("interface", ["eth1", "eth9"])
def test_a_wrong_interface_is_refused_on_all_ranks(pool: Pool, interface: str) -> None:
    """One that leads nowhere, and one that does not exist."""
    with Network(2) as network:
        network.call(1, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "nowhere")
        network.call(1, "ip", "addr", "add", "10.232.0.1/24", "dev", "eth1")
        network.call(1, "ip", "link", "set", "eth1", "up")
        network.call(1, "ip", "link", "set", "nowhere", "up")
        began_s = time.monotonic()
        results = HostRanks(network, pool).run_script(
            SCRIPT,
            ["1", "3"],
            env_of=lambda rank: {"GLOO_SOCKET_IFNAME": interface} if rank == 1 else {},
        )
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        assert result.time - began_s < WORST_S, text
        assert f"{interface}" in result.output and "'host1'" in result.output, text
        assert "GLOO_SOCKET_IFNAME" in result.output, text


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("master", ["address", "name"])
def test_hosts_without_names_need_an_address(pool: Pool, master: str) -> None:
    with Network(2, has_names=False) as network:
        began_s = time.monotonic()
        env = {} if master == "address" else {"MASTER_ADDR": "host0"}
        results = HostRanks(network, pool).run_script(SCRIPT, ["2", "5"], env=env, timeout=60)
    if master == "address":
        return check_trained(results, 5)
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        assert result.time - began_s < WORST_S, text
        assert "does not know the address of 'host0'" in result.output, text
    return None
