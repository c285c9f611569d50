"""Launchers start lost processes again, with the variables that these had, and the job goes on."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from smp_cli.environment import free_port
from smp_cli.supervisor import EXIT_RESUME

from tests.dist.pool import Pool
from tests.dist.processes import REPO, Ended, Started, launch, start_ranks, wait_for_ranks
from tests.dist.test_going_on import ALL, MANY_STEPS, SCRIPT, STEPS, Layout, words
from tests.dist.test_growing import check_as_resumed, pause_until
from tests.dist.test_spares import PP2, check_as_never_killed, keeps_copies
from tests.installed import python_path
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.waits

NUM_JOBS = int(os.environ.get("SMP_NUM_KILLS", "24" if ALL else "6"))


@pytest.fixture(scope="module", name="store")
def _store() -> Iterator[str]:
    """Address of a store in a process of its own."""
    command = [sys.executable, "-m", "smp_cli", "store", "--address", "127.0.0.1"]
    env = {**os.environ, "PYTHONPATH": python_path(REPO)}
    server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"SMP_RENDEZVOUS=(tcp://127\.0\.0\.1:\d+)/", server.stdout.readline())
    assert found
    yield found[1]
    server.terminate()
    assert server.wait(PATIENCE_S) == 0


class Pods:
    """Processes of a launcher that starts each one again if it ends, with the same number.

    Args:
        store: address of the store; its name of the job is that of the folder.
        layout: layout of the job.
        argv: arguments of the script in the first processes.
        env: variables of all processes.
        env_of: returns further variables of one of the first processes.
        num_waiting: processes among the first that wait, the last ones.
    """

    def __init__(
        self,
        pool: Pool,
        store: str,
        layout: Layout,
        *argv: str,
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
        num_waiting: int = 0,
    ) -> None:
        self.pool, self.layout = pool, layout
        self.num_ranks = layout.per_replica * layout.dp
        self.started = Started(
            [], Path(tempfile.mkdtemp(prefix="smp-pods-")), time.monotonic() + PATIENCE_S
        )
        self._argv = layout.argv(on_failure="spare", redundancy=int(keeps_copies(layout)))
        self._env = {
            "WORLD_SIZE": str(self.num_ranks + num_waiting),
            "SMP_SPARES": str(num_waiting),
            "SMP_RENDEZVOUS": f"{store}/{self.started.folder.name}",
            **(env or {}),
        }
        for rank in range(self.num_ranks + num_waiting):
            self.start(rank, *argv, env=env_of(rank))

    def start(self, rank: int, *argv: str, env: Mapping[str, str] | None = None) -> int:
        """Starts a process with the number of a rank; returns its index."""
        index = len(self.started.pids)
        log = str(self.started.folder / f"rank{index}.log")
        settings = {**self._env, "RANK": str(rank), **(env or {})}
        words, zygote = [*self._argv, *argv], self.pool.zygote()
        self.started.pids.extend(zygote.start("script", str(SCRIPT), words, settings, log))
        return index

    def output(self, index: int) -> str:
        log = self.started.folder / f"rank{index}.log"
        return log.read_text() if log.exists() else ""

    def outputs(self) -> str:
        return "\n".join(f"{n}: {self.output(n)}" for n in range(len(self.started.pids)))

    def await_end_of(self, *indices: int) -> None:
        zygote = self.pool.zygote()
        pids = [self.started.pids[index] for index in indices]
        wait_until(lambda: all(zygote.ended(pid) for pid in pids), self.outputs)

    def end(self) -> list[Ended]:
        """Waits until all processes have ended, also those that wait.

        Returns:
            the process with each number, which is not always that of its start, as one may die
            before it has a number; without a number: what ended before.
        """
        ended = wait_for_ranks(self.pool, self.started)
        assert not any(one.hung for one in ended), words(ended)
        of = {}
        for one in ended:
            found = re.search(r"NUMBER (\d+)", one.output) or re.search(
                r"process (\d+) was not needed", one.output
            )
            if found:
                of[int(found[1])] = one
        missing = [one for one in ended if one not in of.values()]
        found_all = [of.get(number) or missing.pop(0) for number in range(len(ended))]
        return [
            Ended(number, one.returncode, one.time, one.output)
            for number, one in enumerate(found_all)
        ]


def await_steps(pods: Pods, step: int, *ranks: int) -> None:
    wait_until(lambda: all(f"STEP {step} " in pods.output(rank) for rank in ranks), pods.outputs)


FLAGS = ("--by-place", f"--steps={STEPS}", "--step-s=0.03")


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(
    "layout", [PP2, Layout(dp=3), Layout(tp=2)], ids=lambda value: repr(value)[6:]
)
def test_a_job_grows_with_processes_that_have_the_numbers_of_lost_ones(
    pool: Pool, tmp_path: Path, store: str, layout: Layout
) -> None:
    flags = [*FLAGS, f"--until={layout.per_replica * layout.dp}"]
    last, per = layout.per_replica * layout.dp - 1, layout.per_replica
    pods = Pods(pool, store, layout, *flags, f"--die={last}:backward:2")
    lost = list(range(last + 1 - per, last + 1))
    pods.await_end_of(*lost)
    wait_until(lambda: "RESIZED " in pods.output(0), pods.outputs)
    for rank in lost:
        pods.start(rank, *flags)
    ended = pods.end()
    resizes = check_as_resumed(pool, tmp_path, layout, ended)
    dp = layout.dp * layout.tp
    assert [one["sizes"] for one in resizes] == [[dp, dp - layout.tp], [dp - layout.tp, dp]]
    assert all("TAKEN " in one.output for one in ended[last + 1 :])
    # A launcher starts those again whose status is not 0.
    statuses = [ended[rank].returncode for rank in lost]
    assert statuses == [EXIT_RESUME] * (per - 1) + [-signal.SIGKILL]


class Kept(Pods):
    """Pods that are started again some time after they have failed."""

    def __init__(self, *args: Any, dice: random.Random, flags: Sequence[str]) -> None:
        super().__init__(*args, *flags)
        self._dice, self._flags = dice, flags
        self._number_of = list(range(self.num_ranks))
        self._due_s: dict[int, float] = {}

    @property
    def living(self) -> list[int]:
        zygote = self.pool.zygote()
        return [n for n, pid in enumerate(self.started.pids) if zygote.ended(pid) is None]

    @property
    def is_over(self) -> bool:
        return any("RESULT " in self.output(n) for n in range(len(self.started.pids)))

    def keep_up(self) -> None:
        """Starts those again whose time has come."""
        for index, pid in enumerate(self.started.pids):
            ended, now_s = self.pool.zygote().ended(pid), time.monotonic()
            if ended is None or ended[0] == 0 or self.is_over:
                continue
            due_s = self._due_s.setdefault(index, now_s + self._dice.uniform(0.0, 1.5))
            if now_s > due_s:
                assert len(self.started.pids) < 30, self.outputs()
                self._due_s[index] = float("inf")
                self._number_of.append(self._number_of[index])
                self.start(self._number_of[index], *self._flags)


LAYOUTS = (
    Layout(pp=2), Layout(pp=2, dp=1), Layout(dp=3), Layout(tp=2), Layout(pp=3, dp=1),
    Layout(dp=4, keys=(("sharded_data_parallel_degree", 4),)),
)  # fmt: skip


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("index", range(NUM_JOBS))
def test_jobs_whose_processes_are_killed_and_started_again_end_whole(
    pool: Pool, tmp_path: Path, store: str, index: int
) -> None:
    dice = random.Random(7000 * int(os.environ["SMP_GRID_SEED"]) + index)
    layout = LAYOUTS[index % len(LAYOUTS)]
    has_copies = keeps_copies(layout)
    num_ranks, per = layout.per_replica * layout.dp, layout.per_replica
    flags = [f"--steps={MANY_STEPS}", "--step-s=0.03"]
    if not has_copies:
        flags += ["--by-place", f"--until={num_ranks}"]
    pods = Kept(pool, store, layout, dice=dice, flags=flags)
    await_steps(pods, 1, *range(num_ranks))
    kept = dice.randrange(layout.dp)  # else there may be no whole replica
    killed = list[int]()
    for _ in range(1 if has_copies else dice.choice([1, 2, 3])):
        pause_until(time.monotonic() + dice.uniform(0.0, 1.5), pods.keep_up)
        targets = [n for n in pods.living if has_copies or n // per != kept]
        if targets and not pods.is_over:
            killed.append(dice.choice(targets))
            pool.zygote().kill(pods.started.pids[killed[-1]])

    def is_over() -> bool:
        pods.keep_up()
        time.sleep(0.05)
        return pods.is_over or not pods.living

    wait_until(is_over, pods.outputs)
    ended = pods.end()
    num_killed = sum(one.returncode == -signal.SIGKILL for one in ended)
    assert killed and num_killed == len(set(killed))
    if has_copies:
        check_as_never_killed(pool, tmp_path, layout, ended, MANY_STEPS)
    else:
        check_as_resumed(pool, tmp_path, layout, ended)
    assert sum("RESULT " in one.output for one in ended) == num_ranks, words(ended)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        (Layout(pp=2, dp=1), 1),
        (Layout(pp=2, dp=1), 0),
        (Layout(pp=3, dp=1), 1),
        (Layout(dp=4, keys=(("sharded_data_parallel_degree", 4),)), 2),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_ranks_without_replicas_wait_for_the_process_that_replaces_a_lost_one(
    pool: Pool, tmp_path: Path, store: str, layout: Layout, victim: int
) -> None:
    flags = [f"--steps={STEPS}"]
    pods = Pods(pool, store, layout, *flags, f"--die={victim}:forward:2")
    pods.await_end_of(victim)
    time.sleep(1.0)  # a scheduler takes its time
    newcomer = pods.start(victim, *flags)
    ended = pods.end()
    [resize] = check_as_never_killed(pool, tmp_path, layout, ended)
    assert (resize["lost"], resize["newcomers"]) == ([victim], [newcomer])


def test_replicas_wait_for_a_process_if_they_are_told_to(
    pool: Pool, tmp_path: Path, store: str
) -> None:
    wait = {"SMP_REPLACEMENT_S": str(PATIENCE_S)}
    pods = Pods(pool, store, PP2, f"--steps={STEPS}", "--die=3:forward:2", env=wait)
    pods.await_end_of(3)
    time.sleep(1.0)
    newcomer = pods.start(3, f"--steps={STEPS}")
    [resize] = check_as_never_killed(pool, tmp_path, PP2, pods.end())
    assert resize["sizes"] == [2, 2] and resize["newcomers"] == [newcomer]


def test_smp_run_replaces_a_rank_without_which_the_others_cannot_go_on(
    pool: Pool, tmp_path: Path
) -> None:
    layout = Layout(pp=2, dp=1)
    command = [sys.executable, "-m", "smp_cli", "run", "-n", "2", "--max-replacements=1"]
    words = [*layout.argv(on_failure="spare", redundancy=1), "--die=1:forward:2"]
    logs = tmp_path / "logs"
    job = launch([*command, f"--log-dir={logs}", str(SCRIPT), *words, f"--steps={STEPS}"])
    assert job.returncode == 0, job.stdout
    assert "process 2 is started in place of 1, and waits (1 of 1)" in job.stdout
    ended = [Ended(n, 0, 0.0, (logs / f"rank{n}.log").read_text()) for n in range(3)]
    [resize] = check_as_never_killed(pool, tmp_path, layout, ended)
    assert resize["newcomers"] == [2]


def test_a_job_that_only_shrinks_takes_no_process_with_the_rank_of_a_lost_one(
    pool: Pool, tmp_path: Path
) -> None:
    layout, flags = Layout(dp=3), ["--steps=400", "--step-s=0.02"]
    argv = [*layout.argv(on_failure="shrink"), *flags]
    env = {"SMP_RENDEZVOUS": f"file://{tmp_path}/meeting"}
    started = start_ranks(pool, SCRIPT, 3, [*argv, "--die=2:forward:2"], env=env)
    log = started.folder / "rank0.log"
    wait_until(lambda: log.exists() and "RESIZED " in log.read_text(), log.read_text)
    again = {"RANK": "2", "WORLD_SIZE": "3", **env}
    late = str(started.folder / "rank3.log")
    started.pids.extend(pool.zygote().start("script", str(SCRIPT), argv, again, late))
    ended = wait_for_ranks(pool, started)
    assert ended[3].returncode == 1
    assert "another process was rank 2 of this job already" in ended[3].output, ended[3].output
    assert all("RESULT " in one.output for one in ended[:2]), words(ended)


def test_a_job_without_replicas_ends_if_no_process_comes(pool: Pool, store: str) -> None:
    layout = Layout(pp=2, dp=1)
    wait = {"SMP_REPLACEMENT_S": "1"}
    pods = Pods(pool, store, layout, f"--steps={STEPS}", "--die=1:forward:2", env=wait)
    first, _ = pods.end()
    assert first.returncode == 1 and "global_rank 1" in first.output, first.output


def test_the_last_processes_of_a_launcher_wait_and_end_with_the_job(
    pool: Pool, tmp_path: Path, store: str
) -> None:
    flags = [f"--steps={STEPS}"]
    pods = Pods(pool, store, PP2, *flags, "--die=2:sum:2", num_waiting=2)
    ended = pods.end()
    [resize] = check_as_never_killed(pool, tmp_path, PP2, ended)
    assert resize["sizes"] == [2, 2] and set(resize["newcomers"]) < {4, 5}
    [idle] = {4, 5} - set(resize["newcomers"])
    assert ended[idle].returncode == 0, ended[idle].output
    assert f"the job has ended, process {idle} was not needed" in ended[idle].output


def test_a_process_that_comes_after_the_end_ends_as_well(pool: Pool, store: str) -> None:
    pods = Pods(pool, store, Layout(), f"--steps={STEPS}")
    pods.await_end_of(0, 1)
    pods.start(1, f"--steps={STEPS}")
    late = pods.end()[2]
    assert late.returncode == 0 and "process 2 was not needed" in late.output, late.output


@pytest.fixture(name="port")
def _port() -> int:
    return free_port("127.0.0.1")


def torchrun(
    folder: Path, port: int, node: int, layout: Layout, *argv: str
) -> subprocess.Popen[str]:
    """Starts torchrun for one host of two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    command += [f"--nproc-per-node={layout.per_replica}", "--master-addr=127.0.0.1"]
    command += [f"--master-port={port}", str(SCRIPT), *layout.argv(on_failure="spare"), *argv]
    removed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SMP_RENDEZVOUS")
    env = {name: value for name, value in os.environ.items() if name not in removed}
    env |= {"PYTHONPATH": python_path(REPO), "OMP_NUM_THREADS": "1", "SMP_SPARES": "0"}
    log = (folder / f"node{node}-{time.monotonic()}.log").open("w")
    return subprocess.Popen(
        command, env=env, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=folder
    )


def test_torchrun_is_started_again_on_a_host_that_was_lost(tmp_path: Path, port: int) -> None:
    flags = [*FLAGS, "--until=4"]
    agents = [torchrun(tmp_path, port, 0, PP2, *flags)]
    agents += [torchrun(tmp_path, port, 1, PP2, *flags, "--die=3:backward:2")]

    def outputs() -> list[str]:
        return [log.read_text() for log in sorted(tmp_path.glob("node*.log"))]

    wait_until(lambda: agents[1].poll() is not None, outputs)
    wait_until(lambda: "RESIZED " in outputs()[0], outputs)
    agents.append(torchrun(tmp_path, port, 1, PP2, *flags))
    wait_until(lambda: all(agent.poll() is not None for agent in agents), outputs)
    assert [agents[0].returncode, agents[2].returncode] == [0, 0], outputs()
    assert "a replica more can join" in outputs()[0], outputs()
    results = [line for text in outputs() for line in text.splitlines() if "RESULT " in line]
    assert len(results) == 4, outputs()
    steps = {re.search(r'"step": (\d+)', line)[1] for line in results}  # type: ignore[index]
    assert len(steps) == 1 and all('"sizes": [2, 1, 2]' in line for line in results), results
