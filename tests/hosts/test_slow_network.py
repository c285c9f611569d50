"""A slow network is no deadlock, and a deadlock on it is one.

`SMP_GRID=all` runs the table: larger parameters at several speeds, a collective of a minute.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO, Ended, wait_for_ranks
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import TRANSPORTS, HostRanks
from tests.patience import wait_until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SCRIPT = REPO / "tests" / "dist" / "scripts" / "slow_link.py"
DEADLOCK_S = 5.0
needs_all = pytest.mark.skipif(os.environ.get("SMP_GRID") != "all", reason="SMP_GRID=all runs it")
# Rows of the square parameter, Mbit/s, and what its broadcast takes at least.
TABLE = [
    (8192, 1000.0, 2.0),
    (8192, 500.0, 4.0),
    (8192, 200.0, 10.0),
    (8192, 100.0, 20.0),
    (4096, 8.5, 60.0),  # one collective of a minute
]


def seconds_of(results: list[Ended], word: str) -> float:
    """The longest that ranks print after a word."""
    found = [re.search(rf"^{word} ([\d.]+)", r.output, re.MULTILINE) for r in results]
    return max(float(one[1]) for one in found if one)


def check_trained(results: list[Ended], name: str, at_least_s: float) -> None:
    for result in results:
        text = f"{name}, rank {result.rank}:\n{result.output}"
        assert not result.hung, f"hangs: {text}"
        assert result.returncode == 0 and "FINISHED" in result.output, text
        assert not re.search("(?i)deadlock|has left|died", result.output), text
    broadcast_s, step_s = seconds_of(results, "BROADCAST"), seconds_of(results, "STEP")
    print(f"{name}: broadcast {broadcast_s:.1f} s, step {step_s:.1f} s: trained")
    assert broadcast_s > at_least_s, "the link is not as slow as it should be"


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collective_longer_than_a_deadlock_trains(pool: Pool, shared: str, transport: str) -> None:
    """4 MiB at 4.5 Mbit/s: 7.5 s for the broadcast, and as much for the reduction."""
    with Network(2, mbit=4.5) as network:
        results = HostRanks(network, pool, transport=transport).run_script(
            SCRIPT, ["1024"], env={"SMP_SHM": shared}
        )
    name = f"1024 x 1024 at 4.5 Mbit/s (SMP_SHM={shared}, {transport})"
    check_trained(results, name, DEADLOCK_S)


@needs_all
@pytest.mark.parametrize(("rows", "mbit", "at_least_s"), TABLE)
def test_table_of_slow_networks(pool: Pool, rows: int, mbit: float, at_least_s: float) -> None:
    with Network(2, mbit=mbit) as network:
        results = HostRanks(network, pool).run_script(SCRIPT, [str(rows)])
    check_trained(results, f"{rows} x {rows} at {mbit:g} Mbit/s", at_least_s)


@needs_all
def test_time_out_shorter_than_a_collective_grows_with_its_size(pool: Pool) -> None:
    """16 MiB at 6 Mbit/s take 22 s; SMP_TIMEOUT_S is for what the size does not explain."""
    with Network(2, mbit=6.0) as network:
        results = HostRanks(network, pool).run_script(SCRIPT, ["2048"], env={"SMP_TIMEOUT_S": "15"})
    check_trained(results, "2048 x 2048 at 6 Mbit/s, SMP_TIMEOUT_S=15", 20.0)


@pytest.mark.parametrize("fault", ["barrier", "receive"])
def test_deadlock_on_a_slow_link_is_found(pool: Pool, fault: str) -> None:
    with Network(2, mbit=50.0) as network:
        results = HostRanks(network, pool).run_script(
            SCRIPT, ["64", "--steps", "3", "--fault", fault]
        )
    assert re.search("^FAULT ", results[1].output, re.MULTILINE), results[1].output
    for result in results:
        text = f"rank {result.rank}:\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        assert "deadlock: every rank waits" in result.output, text
        assert "global_rank 0" in result.output and "global_rank 1" in result.output, text


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_end_of_a_rank_in_the_middle_of_a_transfer_ends_all(
    pool: Pool, number: signal.Signals
) -> None:
    """The rest of the broadcast would take far longer than the test waits."""
    with Network(2, mbit=0.02) as network:
        started = HostRanks(network, pool).start_script(SCRIPT, ["1024"])
        log = started.folder / "rank1.log"
        wait_until(lambda: log.exists() and "IN BROADCAST" in log.read_text(), log.read_text)
        time.sleep(3.0)
        os.kill(started.pids[1], number)
        results = wait_for_ranks(pool, started)
    for result in results:
        assert not result.hung and result.returncode != 0, result.output
    assert re.search(r"(?<!\[)global_rank 1 \(pp", results[0].output), results[0].output


@pytest.mark.sample(keep=0)
def test_cut_cable_is_no_deadlock_of_the_script(pool: Pool) -> None:
    """Cuts the cable while all ranks are in one collective: no rank has called another one."""
    with Network(2, mbit=4.5) as network:
        started = HostRanks(network, pool).start_script(SCRIPT, ["1024"], env={"SMP_HANG_S": "8"})
        log = started.folder / "rank1.log"
        wait_until(lambda: log.exists() and "IN BROADCAST" in log.read_text(), log.read_text)
        time.sleep(1.0)
        network.cut(1)
        time.sleep(12.0)
        texts = [(started.folder / f"rank{rank}.log").read_text() for rank in range(2)]
        for pid in started.pids:
            pool.zygote().kill(pid)
    assert not any("deadlock" in text for text in texts), texts
    assert "HAS SAID NOTHING" in texts[1] and "global_rank 0" in texts[1], texts[1]
