"""A host is gone, and the ranks of the others go on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import Ended, wait_for_ranks
from tests.dist.test_going_on import MANY_STEPS, SCRIPT, STEPS, Layout, check_as_resumed, words
from tests.dist.test_growing import check_as_resumed as check_as_grown
from tests.dist.test_replacements import Pods, await_steps
from tests.dist.test_spares import check_as_never_killed
from tests.dist.zygote import HOST_VARIABLE
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import TRANSPORTS, HostRanks, end_session, start_command
from tests.hosts.test_smp_run import Command, running
from tests.patience import wait_until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("kills", [True, False], ids=["killed", "cut_off"])
@pytest.mark.parametrize(("host", "transport"), [(0, TRANSPORTS[1]), (1, TRANSPORTS[0])])
def test_the_ranks_of_the_other_host_go_on(
    pool: Pool, tmp_path: Path, host: int, transport: str, kills: bool
) -> None:
    """Ranks that are cut off live, and each side has lost the other: one of them goes on."""
    layout = Layout(pp=2)
    with Network(2) as network:
        ranks = HostRanks(network, pool, ranks_per_host=2, transport=transport)
        meeting = {"SMP_RENDEZVOUS": f"file://{tmp_path}/meeting", "GLOO_SOCKET_IFNAME": "eth0"}
        argv = [*layout.argv(on_failure="shrink"), f"--steps={MANY_STEPS}", "--step-s=0.03"]
        started = ranks.start_script(SCRIPT, argv, env=meeting)
        logs = [started.folder / f"rank{rank}.log" for rank in range(4)]
        wait_until(
            lambda: all(log.exists() and "STEP 3 " in log.read_text() for log in logs),
            lambda: "\n".join(log.read_text() for log in logs if log.exists()),
        )
        network.remove(host)
        if kills:
            for pid in started.pids[2 * host : 2 * host + 2]:
                os.kill(pid, signal.SIGKILL)
        ended = wait_for_ranks(pool, started)
    assert not any(rank.hung for rank in ended), words(ended)
    [resize] = check_as_resumed(pool, tmp_path, layout, ended, MANY_STEPS)
    lost = sorted(resize["lost"])
    assert lost == [2 * host, 2 * host + 1] if kills else lost in ([0, 1], [2, 3])
    assert resize["step"] > 3, "after steps of all"


class Store:
    """``smp store`` on a host, while the block lasts."""

    def __init__(self, network: Network, host: int, folder: Path) -> None:
        self._log, command = folder / "store.log", ["python", "-m", "smp_cli", "store"]
        self._process = start_command(network, host, command, self._log, {})

    def __enter__(self) -> str:
        pattern = r"SMP_RENDEZVOUS=(tcp://host\d+:\d+)/"
        wait_until(lambda: re.search(pattern, self._log.read_text()), self._log.read_text)
        found = re.search(pattern, self._log.read_text())
        assert found
        return found[1]

    def __exit__(self, *_: object) -> None:
        end_session(self._process)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_host_takes_the_place_of_a_lost_one(
    pool: Pool, tmp_path: Path, transport: str
) -> None:
    flags = ["--by-place", "--until=4", f"--steps={MANY_STEPS}", "--step-s=0.03"]
    layout, env = Layout(pp=2), {"SMP_TRANSPORT": transport}
    with Network(4) as network, Store(network, 3, tmp_path) as store:

        def on(host: int) -> Mapping[str, str]:
            return {HOST_VARIABLE: str(network.pid(host))}

        pods = Pods(pool, store, layout, *flags, env=env, env_of=lambda rank: on(rank // 2))
        await_steps(pods, 3, *range(4))
        network.kill(1)
        wait_until(lambda: "RESIZED " in pods.output(0), pods.outputs)
        for rank in (2, 3):
            pods.start(rank, *flags, env=on(2))
        ended = pods.end()
    resizes = check_as_grown(pool, tmp_path, layout, ended)
    assert [one["sizes"] for one in resizes] == [[2, 1], [1, 2]]
    assert resizes[1]["newcomers"] == [4, 5]


@pytest.mark.sample(keep=0)
def test_ranks_say_so_if_the_host_of_their_store_is_gone(pool: Pool, tmp_path: Path) -> None:
    flags = [f"--steps={20 * MANY_STEPS}", "--step-s=0.03"]
    with Network(3) as network, Store(network, 2, tmp_path) as store:
        host_of = [str(network.pid(rank // 2)) for rank in range(4)]
        pods = Pods(
            pool, store, Layout(pp=2), *flags, env_of=lambda rank: {HOST_VARIABLE: host_of[rank]}
        )
        await_steps(pods, 3, *range(4))
        network.remove(2)
        known = pods.output(0).count("STEP ")
        wait_until(lambda: pods.output(0).count("STEP ") > known + 20, pods.outputs)
        os.kill(pods.started.pids[3], signal.SIGKILL)
        ended = pods.end()
    for one in ended[:3]:
        assert one.returncode == 1 and "the store in which the ranks meet" in one.output, one.output


def of_command(command: Command, folder: Path) -> list[Ended]:
    """Returns what each process of `smp run` has printed, from its log file."""
    assert command.wait() == 0, command.said
    logs = sorted((folder / "logs").iterdir(), key=lambda path: int(path.stem[4:]))
    return [Ended(n, 0, 0.0, log.read_text()) for n, log in enumerate(logs)]


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("lost", [0, 1])
def test_smp_run_keeps_processes_on_another_host(pool: Pool, tmp_path: Path, lost: int) -> None:
    """The processes of the last host wait, and take the places of a whole host."""
    layout = Layout(pp=2)
    flags = [*layout.argv(on_failure="spare"), f"--steps={MANY_STEPS}", "--step-s=0.03"]
    options = ["-n", "4", "--spares", "2", "--log-dir", str(tmp_path / "logs")]
    hosts = "host1,host2,host3"  # the command is on host0
    with Network(4) as network, running(
        network, tmp_path, *options, str(SCRIPT), *flags, hosts=hosts
    ) as command:  # fmt: skip
        for rank in range(4):
            command.wait_for(rf"\[{rank}\] STEP 3 ")
        network.kill(1 + lost)
        ended = of_command(command, tmp_path)
    [resize] = check_as_never_killed(pool, tmp_path, layout, ended, MANY_STEPS)
    assert resize["sizes"] == [2, 2] and resize["lost"] == [2 * lost, 2 * lost + 1]
    assert sorted(resize["newcomers"]) == [4, 5]
    assert f"host host{1 + lost}: " in command.said and "are lost" in command.said
    assert "which it has lost; [4, 5] have taken places" in command.said, command.said


@pytest.mark.sample(keep=0)
def test_smp_run_replaces_processes_on_their_hosts(pool: Pool, tmp_path: Path) -> None:
    layout = Layout(pp=2)
    flags = [*layout.argv(on_failure="spare"), "--by-place", "--until=4", f"--steps={STEPS}"]
    flags += ["--step-s=0.03", "--die=3:backward:2"]
    options = ["-n", "4", "--max-replacements", "3", "--log-dir", str(tmp_path / "logs")]
    with Network(2) as network, running(
        network, tmp_path, *options, str(SCRIPT), *flags
    ) as command:  # fmt: skip
        ended = of_command(command, tmp_path)
    resizes = check_as_grown(pool, tmp_path, layout, ended)
    assert [one["sizes"] for one in resizes] == [[2, 1], [1, 2]]
    assert resizes[1]["newcomers"] == [4, 5]
    assert "process 4 is started in place of 3, and waits (1 of 3)" in command.said


@pytest.mark.sample(keep=0)
def test_smp_run_has_the_store_if_ranks_go_on_without_the_first_host(
    pool: Pool, tmp_path: Path
) -> None:
    layout = Layout(pp=2)
    flags = [*layout.argv(on_failure="shrink"), f"--steps={MANY_STEPS}", "--step-s=0.03"]
    options = ["-n", "4", "--store", "--log-dir", str(tmp_path / "logs")]
    with Network(3) as network, running(
        network, tmp_path, *options, str(SCRIPT), *flags, hosts="host1,host2"
    ) as command:  # fmt: skip
        for rank in range(4):
            command.wait_for(rf"\[{rank}\] STEP 3 ")
        network.kill(1)
        ended = of_command(command, tmp_path)
    [resize] = check_as_resumed(pool, tmp_path, layout, ended, MANY_STEPS)
    assert resize["lost"] == [0, 1]
    assert "the job has finished without the ranks [0, 1]" in command.said, command.said
