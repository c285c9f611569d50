"""Preemption, deaths, hangs and restarts of jobs that save, with the launchers that users have."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smp.checkpoint import folder as folders
from smp.checkpoint import inspection
from smp.checkpoint import manifest as manifests
from tests.dist.pool import Pool
from tests.dist.processes import (
    REPO,
    Ended,
    Started,
    launch,
    run_ranks,
    start_ranks,
    torchrun,
    wait_for_ranks,
)
from tests.installed import python_path
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.waits

SCRIPT = REPO / "tests" / "dist" / "scripts" / "robust.py"
EXIT_RESUME = 75
ALL = os.environ.get("SMP_GRID") == "all"
SEED = int(os.environ["SMP_GRID_SEED"])


def run(pool: Pool, folder: Path, *argv: str, **env: str) -> list[Ended]:
    return run_ranks(pool, SCRIPT, 2, [str(folder), *argv], env=env)


def words(results: list[Ended]) -> str:
    return "\n".join(f"rank {r.rank} ({r.returncode}):\n{r.output}" for r in results)


def steps_of(result: Ended) -> list[int]:
    return [int(step) for step in re.findall(r"(?:STEP|BEGIN) (\d+)", result.output)]


def step_saved(folder: Path) -> int:
    """Returns the step of the newest checkpoint."""
    found = re.search(r"\d+", folders.find(folder, None).name)
    assert found
    return int(found[0])


class Trained:
    """Collects the output of a job, in one start or in several."""

    def __init__(self) -> None:
        self.losses: dict[int, set[str]] = {}
        self.digests: dict[int, str] = {}

    def add(self, output: str) -> None:
        """Adds the output of one rank, or of a whole pipeline, since its start."""
        own = re.findall(r"STEP (\d+) (\S+)", output)
        assert not {int(step) for step, _ in own} & self.losses.keys(), "a step ran twice"
        for step, loss in own:
            self.losses.setdefault(int(step), set()).add(loss)
        self._add_digests(output)

    def add_ranks(self, results: list[Ended]) -> None:
        """Adds the output of all ranks; only the first rank's losses count, as replicas' differ."""
        assert not any(r.returncode for r in results), words(results)
        self.add(results[0].output)
        for result in results[1:]:
            self._add_digests(result.output)

    def _add_digests(self, output: str) -> None:
        for result in re.findall(r"RESULT (\{.*\})", output):
            told = json.loads(result)
            self.digests[told["rank"]] = told["digest"]

    def check(self, expected: Trained, first: int, last: int) -> None:
        """Bit by bit the same, over these steps and at the end."""
        assert sorted(self.losses) == list(range(first, last + 1))
        for step, losses in self.losses.items():
            assert losses == expected.losses[step] and len(losses) == 1
        assert self.digests == expected.digests and len(self.digests) > 1


def undisturbed(pool: Pool, folder: Path, num_ranks: int, *argv: str) -> Trained:
    results = run_ranks(pool, SCRIPT, num_ranks, [str(folder / "undisturbed"), *argv])
    trained = Trained()
    trained.add_ranks(results)
    return trained


def wait_for(pool: Pool, started: Started, text: str, rank: int = 0) -> str:
    """The output of a rank once it has printed something that matches."""
    log = started.folder / f"rank{rank}.log"
    output = ""

    def has_come() -> bool:
        nonlocal output
        output = log.read_text() if log.exists() else ""
        return re.search(text, output) is not None

    wait_until(
        has_come,
        lambda: f"'{text}' in {output}",
        lambda: pool.zygote().ended(started.pids[rank]) is None,
        pause_s=0.002,
    )
    return output


def send(pool: Pool, started: Started, ranks: Iterator[int] | list[int], number: int) -> None:
    for rank in ranks:
        if pool.zygote().ended(started.pids[rank]) is None:
            os.kill(started.pids[rank], number)


# ---- preemption --------------------------------------------------------------------


SHARDED = {"shard_optimizer_state": True, "fp16": True}
LAYOUTS = [(2, {"pipeline_parallel_degree": 2})] + [(2, SHARDED)] * ALL


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(("num_ranks", "config"), LAYOUTS, ids=lambda value: str(value)[:9])
def test_a_job_that_is_preempted_again_and_again_ends_as_if_it_were_not(
    pool: Pool, tmp_path: Path, num_ranks: int, config: dict[str, Any]
) -> None:
    """SIGTERM at random moments, to one rank or to all: 20 in 200 steps, in CI 3 in 30."""
    num_signals, num_steps = (20, 200) if ALL else (3, 30)
    draw = random.Random(SEED)
    common = ["--steps", str(num_steps), "--config", json.dumps(config)]
    expected = undisturbed(pool, tmp_path, num_ranks, *common)
    folder, hold = tmp_path / "job", tmp_path / "hold"
    argv = [str(folder), *common, "--step-s", "0.002", "--hold", str(hold)]
    trained = Trained()
    for after in sorted(draw.sample(range(1, num_steps - num_steps // 5), num_signals)):
        started = start_ranks(pool, SCRIPT, num_ranks, argv)
        wait_for(pool, started, "BEGIN")
        last = max(trained.losses, default=0)
        wait_for(pool, started, rf"STEP {max(after, last + 1)} ")
        time.sleep(draw.uniform(0, 0.02))
        victims = draw.choice([[0], [1], [0, 1]])
        send(pool, started, victims, signal.SIGTERM)
        time.sleep(0.1)  # ranks agree where to stop before those that hold may end
        hold.touch()
        results = wait_for_ranks(pool, started)
        hold.unlink()
        text = f"seed {SEED}, SIGTERM to {victims} after step {after}:\n{words(results)}"
        assert {r.returncode for r in results} == {EXIT_RESUME}, text
        trained.add(results[0].output)
        assert step_saved(folder) == max(trained.losses), text
    hold.touch()
    trained.add_ranks(run_ranks(pool, SCRIPT, num_ranks, argv))
    trained.check(expected, 1, num_steps)


@pytest.mark.parametrize("how", ["ask", "path", "save_to"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.covering(times=1)
def test_sigterm_of_one_rank_stops_all_at_one_step_and_they_resume(
    pool: Pool, tmp_path: Path, how: str, victim: int
) -> None:
    argv = ["--steps", "12", "--step-s", "0.005"] + (["--ask"] if how == "ask" else [])
    env = {"SMP_PREEMPTION_PATH": str(tmp_path)} if how == "path" else {}
    fault = f"rank={victim},step=5,kind=term"
    results = run(pool, tmp_path, *argv, SMP_FAULT=fault, **env)
    text = words(results)
    assert [r.returncode for r in results] == [EXIT_RESUME] * 2, text
    saved = step_saved(tmp_path)
    assert saved >= 5, text
    assert "SIGTERM: all ranks will stop" in results[victim].output
    again = run(pool, tmp_path, *argv, **env)
    assert [r.returncode for r in again] == [0, 0], words(again)
    assert all(f"BEGIN {saved}\n" in r.output for r in again)
    assert all('"step": 12' in r.output for r in again)


def test_sigterm_before_the_first_step_leaves_without_saving(pool: Pool, tmp_path: Path) -> None:
    results = run(pool, tmp_path, SMP_FAULT="rank=0,step=0,kind=term,microbatch=0", SMP_HANG_S="0")
    # The signal comes in the first step; the boundary is after it.
    assert [r.returncode for r in results] == [EXIT_RESUME] * 2, words(results)
    assert step_saved(tmp_path) == 1


def test_sigterm_ends_a_script_that_never_asks(pool: Pool, tmp_path: Path) -> None:
    fault = REPO / "tests" / "dist" / "scripts" / "fault.py"
    results = run_ranks(
        pool, fault, 2, ["none", "none", "0"], env={"SMP_FAULT": "rank=1,step=1,kind=term"}
    )
    assert results[1].returncode == -signal.SIGTERM, words(results)
    assert results[0].returncode not in (0, EXIT_RESUME)


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_nothing_is_saved_after_the_death_of_a_peer(
    pool: Pool, tmp_path: Path, is_asked_before: bool
) -> None:
    """SIGTERM comes when the fault is known, as launchers send it, or when it is not yet."""
    started = start_ranks(
        pool, SCRIPT, 2, [str(tmp_path), "--steps", "2000", "--step-s", "0.01"],
        env={} if is_asked_before else {"SMP_FAULT": "rank=1,step=4,kind=kill"},
    )  # fmt: skip
    if is_asked_before:
        wait_for(pool, started, "STEP 3 ")
        os.kill(started.pids[1], signal.SIGSTOP)  # it cannot answer any more
        os.kill(started.pids[0], signal.SIGTERM)
        time.sleep(0.2)
        os.kill(started.pids[1], signal.SIGKILL)
    while pool.zygote().ended(started.pids[1]) is None:
        time.sleep(0.01)
    send(pool, started, [0], signal.SIGTERM)
    results = wait_for_ranks(pool, started)
    assert results[0].returncode not in (0, EXIT_RESUME) and not results[0].hung, words(results)
    assert re.search(r"(?<!\[)global_rank 1 .*died", results[0].output), words(results)
    assert ("SIGTERM: all ranks will stop" in results[0].output) == is_asked_before
    assert not list(tmp_path.iterdir())


# ---- deaths while a job saves --------------------------------------------------------


def test_kills_while_a_job_saves_leave_what_loads(pool: Pool, tmp_path: Path) -> None:
    """Kills all ranks or one at 5 random moments; the job must end as an undisturbed one does."""
    draw = random.Random(SEED)
    folder, common = tmp_path / "job", ["--rows", "20000", "--config", json.dumps(SHARDED)]
    last, num_in_save = 0, 0
    for victims in ([0, 1], [0], [1], [0, 1], [draw.randrange(2)]):
        started = start_ranks(
            pool, SCRIPT, 2, [str(folder), *common, "--save-each", "--steps", "9999"]
        )
        first = last + draw.randint(2, 3)
        begin = wait_for(pool, started, rf"STEP {first} ")
        assert f"BEGIN {last}" in begin or last == 0, f"{last}: {begin}"
        began_s = time.monotonic()
        wait_for(pool, started, rf"STEP {first + 2} ")
        time.sleep(draw.uniform(0, (time.monotonic() - began_s) / 2))
        send(pool, started, victims, signal.SIGKILL)
        results = wait_for_ranks(pool, started)
        text = f"seed {SEED}, {victims} killed:\n{words(results)}"
        for result in results:
            if result.rank in victims:
                assert result.returncode == -signal.SIGKILL, text
            else:
                assert result.returncode not in (0, EXIT_RESUME) and not result.hung, text
                assert re.search(rf"(?<!\[)global_rank {victims[0]} ", result.output), text
        checkpoints = folders.partial_checkpoints(folder)
        for checkpoint in checkpoints:
            assert not list(inspection.problems(checkpoint)), text
        assert folders.find(folder, None) in checkpoints, text
        last = manifests.read(folders.find(folder, None)).values["steps"]["done"]
        num_in_save += f"SAVED {max(steps_of(results[0]))}\n" not in results[0].output
    assert num_in_save > 0, "every death was between two saves"
    trained, num_steps = Trained(), last + 3
    results = run_ranks(
        pool, SCRIPT, 2, [str(folder), *common, "--save-each", "--steps", str(num_steps)]
    )
    trained.add_ranks(results)
    assert all(f"BEGIN {last}\n" in result.output for result in results)
    assert not list(folder.glob(".*")), "the next saves have left nothing temporary"
    expected = undisturbed(pool, tmp_path, 2, *common, "--steps", str(num_steps))
    trained.check(expected, last + 1, num_steps)


# ---- hangs -------------------------------------------------------------------------


def test_hanging_rank_is_named_with_its_microbatch_and_stack(pool: Pool, tmp_path: Path) -> None:
    started = start_ranks(
        pool, SCRIPT, 2, [str(tmp_path)],
        env={"SMP_FAULT": "rank=1,step=2,kind=hang,microbatch=1", "SMP_HANG_S": "2"},
    )  # fmt: skip
    wait_for(pool, started, "Python stacks of all ranks: /")  # in the file named there
    for pid in started.pids:
        pool.zygote().kill(pid)
    output = wait_for_ranks(pool, started)[0].output
    line = re.search(r"global_rank 1 .*: DOES NOT WAIT since .*", output)
    assert line and "microbatch 1" in line[0], output
    assert re.search(r"global_rank 0 .*: waits in step call", output), output
    stacks = output.split("---- global_rank 1")[1]
    assert "fault_injection.py" in stacks and "in strike" in stacks, output
    assert "robust.py" in output.split("---- global_rank 0")[1].split("----")[0], output


# ---- launchers ---------------------------------------------------------------------


@pytest.mark.sample(keep=0)
def test_torchrun_restarts_all_ranks_and_they_start_cleanly(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_FAULT", "rank=1,step=2,kind=kill")
    command = torchrun(2)
    done = launch([*command, "--max-restarts=2", str(SCRIPT), str(tmp_path), "--steps", "4"])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("SMP_FAULT strikes: kill") == 1
    assert "global_rank 1 (pp 1 tp 0 rdp 0)" in done.stdout, "the survivor names the culprit"
    assert done.stdout.count("BEGIN 0") == 4, "two ranks, twice"
    monkeypatch.delenv("SMP_FAULT")
    trained = Trained()
    trained.add(done.stdout)
    trained.check(undisturbed(pool, tmp_path, 2, "--steps", "4"), 1, 4)


@pytest.mark.sample(keep=0)
def test_smp_run_starts_preempted_ranks_again_unless_it_is_preempted(
    pool: Pool, tmp_path: Path
) -> None:
    """SIGTERM to a rank makes it start all again; to `smp run`, end with the status of resuming."""
    command = [sys.executable, "-m", "smp_cli", "run", "-n", "2", "--max-restarts", "3"]
    process = subprocess.Popen(
        [*command, str(SCRIPT), str(tmp_path / "job"), "--steps", "9999", "--step-s", "0.01"],
        env={
            **os.environ,
            "PYTHONPATH": python_path(REPO),
            "OMP_NUM_THREADS": "1",
            "SMP_FAULT": "rank=0,step=3,kind=term",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    while not re.search(r"(?s)resumed.*STEP 8 ", output):
        line = process.stdout.readline()
        assert line, output
        output += line
    process.send_signal(signal.SIGTERM)
    output += process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == EXIT_RESUME, output
    assert output.count("want to be resumed (status 75)") == 2, output
    begun = [int(step) for step in re.findall(r"BEGIN (\d+)", output)]
    assert begun[:2] == [0, 0] and begun[2] == begun[3] > 3 and len(begun) == 4, output
    last = step_saved(tmp_path / "job") + 2
    trained = Trained()
    trained.add(output)
    trained.add_ranks(run_ranks(pool, SCRIPT, 2, [str(tmp_path / "job"), "--steps", str(last)]))
    trained.check(undisturbed(pool, tmp_path, 2, "--steps", str(last)), 1, last)
