"""``smp run --hosts`` over a network: jobs that are preempted and resumed, and hosts that are bad.

What needs no network is tried by `tests/unit/test_smp_run_hosts.py`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.test_robustness import EXIT_RESUME, SCRIPT, Trained, step_saved, undisturbed
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import end_session, start_command, write_agent
from tests.patience import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

STEPS = 12
CONFIG = {"pipeline_parallel_degree": 2}


class Command:
    """``smp run`` on the first host of a network."""

    def __init__(
        self, network: Network, folder: Path, *options: str, hosts: str = "", **env: str
    ) -> None:
        hosts = hosts or ",".join(network.name(index) for index in range(network.num_hosts))
        agent = folder / "agent"
        if not agent.exists():
            write_agent(network, folder)
        words = [sys.executable, "-m", "smp_cli", "run", "--hosts", hosts, "--agent", str(agent)]
        self._log = folder / "log"
        self._process = start_command(network, 0, [*words, *options], self._log, env)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str) -> None:
        wait_until(
            lambda: re.search(pattern, self.said) is not None,
            lambda: self.said,
            lambda: self._process.poll() is None,
        )

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Status of the command."""
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on after {PATIENCE_S} s:\n{self.said}") from None

    def end(self) -> None:
        end_session(self._process)

    def lines_of(self, rank: int) -> str:
        """Returns the lines that a rank has printed."""
        prefix = f"[{rank}] "
        lines = [line.removeprefix(prefix) for line in self.said.splitlines() if prefix in line]
        return "\n".join(lines)


@contextmanager
def running(network: Network, folder: Path, *options: str, **env: str) -> Iterator[Command]:
    command = Command(network, folder, *options, **env)
    try:
        yield command
    finally:
        command.end()


def script(folder: Path, **more: str) -> list[str]:
    words = [str(SCRIPT), str(folder), "--steps", str(STEPS), "--config", json.dumps(CONFIG)]
    return [*words, *(word for name, value in more.items() for word in (f"--{name}", value))]


def check(pool: Pool, folder: Path, trained: Trained, num_ranks: int) -> None:
    """Losses and state are, bit by bit, those of a job that was left alone."""
    words = ["--steps", str(STEPS), "--config", json.dumps(CONFIG)]
    trained.check(undisturbed(pool, folder, num_ranks, *words), 1, STEPS)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("whom", ["command", "rank"])
def test_a_job_over_hosts_is_preempted_and_goes_on(pool: Pool, tmp_path: Path, whom: str) -> None:
    """SIGTERM to the command ends the job with status 75; to a rank, starts it again at once."""
    folder, hold = tmp_path / "job", tmp_path / "hold"
    trained = Trained()
    restarts = ["--max-restarts", "1"]
    fault = {"SMP_FAULT": "rank=1,step=4,kind=term"} if whom == "rank" else {}
    with Network(2) as network:
        words = script(folder, hold=str(hold))
        with running(network, tmp_path, "-n", "2", *restarts, *words, **fault) as command:
            if whom == "command":
                command.wait_for(r"STEP 4 ")
                command.send(signal.SIGTERM)
            command.wait_for("SIGTERM: all ranks will stop")
            time.sleep(1.0)  # ranks agree where to stop before those that hold may end
            hold.touch()
            if whom == "rank":
                command.wait_for("starting all ranks again")
            assert command.wait() == (0 if whom == "rank" else EXIT_RESUME), command.said
            said = command.said
            assert "the ranks saved their state and want to be resumed" in said
            first, _, second = command.lines_of(0).partition("BEGIN")[2].partition("BEGIN")
            both = command.lines_of(1)
        trained.add(first)
        if whom == "command":
            assert step_saved(folder) == max(trained.losses) < STEPS, said
            hold.touch()
            with running(network, tmp_path, "-n", "2", *words) as command:
                assert command.wait() == 0, command.said
                second, both = command.lines_of(0), command.lines_of(1)
        trained.add(second)
        trained._add_digests(both)
    check(pool, tmp_path, trained, 2)


# ---- preflight -----------------------------------------------------------------------


def test_good_hosts_pass_and_the_job_runs(tmp_path: Path) -> None:
    with Network(2) as network:
        words = ["-n", "2", "--preflight", *script(tmp_path / "job")]
        with running(network, tmp_path, *words) as command:
            assert command.wait() == 0, command.said
            assert f"STEP {STEPS}" in command.lines_of(0) and "preflight" not in command.said


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("wrong", ["pair", "interface", "away"])
def test_nothing_is_started_on_bad_hosts(tmp_path: Path, wrong: str) -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth9"} if wrong == "interface" else {}
    expected = {
        "pair": "preflight: host1 at 10.231.0.2 .*does not reach host2 at 10.231.0.3 .*timed out",
        "interface": "preflight: host host1: .*'host1' has no interface eth9",
        "away": "preflight: host host2: .*agent ended with status 1: ",
    }[wrong]
    with Network(3) as network:
        if wrong == "pair":
            network.part(1, 2)
        words = ["-n", "3", "--preflight", *script(tmp_path / "job")]
        if wrong == "away":
            agent = write_agent(network, tmp_path)
            agent.write_text(agent.read_text().replace("host2)", "none)"))
        with running(network, tmp_path, *words, **env) as command:
            status = command.wait()
            said = command.said
    assert status == 1 and re.search(expected, said), said
    assert "nothing is started" in said and "BEGIN" not in said
    assert not (tmp_path / "job").exists()
