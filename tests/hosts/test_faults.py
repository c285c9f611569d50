"""Faults of a network: a job goes on with the numbers of one process, or all ranks end.

Their errors say which host cannot be reached.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.processes import Ended, Started, wait_for_ranks
from tests.dist.zygote import MONOTONIC_VARIABLE
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import REPO, TRANSPORTS, HostRanks
from tests.hosts.train_on import CASE
from tests.patience import wait_until
from tests.reference.single_process import train_reference

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SCRIPT = REPO / "tests" / "hosts" / "train_on.py"
FOREVER = 1_000_000  # steps


def wait_for_step(started: Started, step: int) -> None:
    """Waits until all ranks have made a step."""
    logs = [started.folder / f"rank{rank}.log" for rank in range(len(started.pids))]
    wait_until(
        lambda: all(log.exists() and f"STEP {step}\n" in log.read_text() for log in logs),
        lambda: [log.read_text() for log in logs if log.exists()],
    )


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


def check_ended(results: list[Ended], hosts_of: Mapping[int, set[str]]) -> None:
    """Checks that all ranks ended, and that each rank names one of the hosts given for it."""
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        if result.rank in hosts_of:
            found = re.findall(r"host (host\d)\): its host cannot be reached", result.output)
            assert set(found) & hosts_of[result.rank], text
            assert "deadlock" not in result.output, text


# ---- faults that pass ----------------------------------------------------------


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.skipif(why_not(1.0) is not None, reason=str(why_not(1.0)))
@pytest.mark.parametrize("how", [{"latency_ms": 100.0}, {"loss_percent": 1.0}], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_late_and_lost_packets_change_no_number(
    pool: Pool, how: dict[str, float], pp: int, transport: str
) -> None:
    """100 ms one way: an answer takes 200."""
    with Network(2, **how) as network:  # type: ignore[arg-type]
        steps = 2 if "latency_ms" in how else 20
        ranks = HostRanks(network, pool, transport=transport)
        results = ranks.run_script(SCRIPT, [str(pp), str(steps)])
        if "loss_percent" in how:
            assert network.num_lost > 5
    check_trained(results, steps)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("pause_s", [2.0, 10.0])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cable_that_is_put_back_changes_no_number(
    pool: Pool, pause_s: float, pp: int, transport: str
) -> None:
    steps = 400
    with Network(2) as network:
        ranks = HostRanks(network, pool, transport=transport)
        started = ranks.start_script(SCRIPT, [str(pp), str(steps)])
        wait_for_step(started, 5)
        network.cut(1)
        seen = (started.folder / "rank0.log").read_text()
        assert "LOSSES" not in seen, "the job is over before the fault"
        time.sleep(pause_s)
        now = (started.folder / "rank0.log").read_text()
        assert now.count("STEP") - seen.count("STEP") < 20, "the cut has stopped nobody"
        network.mend(1)
        results = ranks.wait(started)
    check_trained(results, steps)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_clocks_that_count_from_another_boot_change_no_number(
    pool: Pool, pp: int, transport: str
) -> None:
    """CLOCK_MONOTONIC, by which the library waits. The wall clock is one for all namespaces."""
    with Network(2) as network:
        results = HostRanks(network, pool, transport=transport).run_script(
            SCRIPT, [str(pp), "5"], env_of=lambda rank: {MONOTONIC_VARIABLE: str(rank * 1_000_000)}
        )
    check_trained(results, 5)


# ---- faults that stay ----------------------------------------------------------


Fault = Callable[[Network, Started], None]


def cut(network: Network, started: Started) -> None:
    network.cut(1)


def silence(network: Network, started: Started) -> None:
    network.silence(1)


def vanish(network: Network, started: Started) -> None:
    network.remove(1)
    os.kill(started.pids[1], signal.SIGKILL)  # nothing of it can say goodbye


FAULTS = [
    (fault, pp, TRANSPORTS[(place + pp) % 2])
    for place, fault in enumerate((cut, silence, vanish))
    for pp in (1, 2)
]


@pytest.fixture(scope="module")
def faulty_jobs(pool: Pool) -> Iterator[dict[tuple[Fault, int, str], Started]]:
    """Yields jobs that train and lose a host one by one, and then all wait for it together."""
    with contextlib.ExitStack() as networks:
        jobs: dict[tuple[Fault, int, str], Started] = {}
        for fault, pp, transport in FAULTS:
            network = networks.enter_context(Network(2))
            argv = [str(pp), str(FOREVER)]
            ranks = HostRanks(network, pool, transport=transport)
            started = ranks.start_script(SCRIPT, argv)
            wait_for_step(started, 5)
            jobs[fault, pp, transport] = started
            fault(network, started)
        yield jobs


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(("fault", "pp", "transport"), FAULTS)
def test_a_host_that_is_gone_ends_the_job(
    pool: Pool,
    faulty_jobs: dict[tuple[Fault, int, str], Started],
    fault: Fault,
    pp: int,
    transport: str,
) -> None:
    check_ended(
        wait_for_ranks(pool, faulty_jobs[fault, pp, transport]),
        {0: {"host1"}} if fault is vanish else {0: {"host1"}, 1: {"host0"}},
    )


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [1, 3])
def test_two_hosts_that_only_the_others_reach_end_the_job(pool: Pool, pp: int) -> None:
    """Rank 0, which looks after all, reaches both."""
    with Network(3) as network:
        ranks = HostRanks(network, pool)
        started = ranks.start_script(SCRIPT, [str(pp), str(FOREVER)])
        wait_for_step(started, 5)
        network.part(1, 2)
        results = ranks.wait(started)
    check_ended(results, dict.fromkeys(range(3), {"host1", "host2"}))


# ---- faults at the start -------------------------------------------------------


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(("one", "other"), [(1, 2)])
def test_hosts_that_do_not_reach_each_other_are_refused(pool: Pool, one: int, other: int) -> None:
    with Network(3) as network:
        network.part(one, other)
        results = HostRanks(network, pool).run_script(SCRIPT, ["1", "3"])
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        assert f"host 'host{one}' at 10.231.0.{one + 1}" in result.output, text
        assert f"does not reach host 'host{other}'" in result.output, text


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("interface", ["eth1", "eth9"])
def test_a_wrong_interface_is_refused_on_all_ranks(pool: Pool, interface: str) -> None:
    """Gives one rank an interface that leads nowhere, or the name of a missing interface."""
    with Network(2) as network:
        network.call(1, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "nowhere")
        network.call(1, "ip", "addr", "add", "10.232.0.1/24", "dev", "eth1")
        network.call(1, "ip", "link", "set", "eth1", "up")
        network.call(1, "ip", "link", "set", "nowhere", "up")
        results = HostRanks(network, pool).run_script(
            SCRIPT,
            ["1", "3"],
            env_of=lambda rank: {"GLOO_SOCKET_IFNAME": interface} if rank == 1 else {},
        )
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        assert f"{interface}" in result.output and "'host1'" in result.output, text
        assert "GLOO_SOCKET_IFNAME" in result.output, text


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("master", ["address", "name"])
def test_hosts_without_names_need_an_address(pool: Pool, master: str) -> None:
    with Network(2, has_names=False) as network:
        env = {} if master == "address" else {"MASTER_ADDR": "host0"}
        results = HostRanks(network, pool).run_script(SCRIPT, ["2", "5"], env=env)
    if master == "address":
        return check_trained(results, 5)
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        assert "does not know the address of 'host0'" in result.output, text
    return None
