"""Preemption, injected faults, hangs and restarts, with the launchers that users have."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import (
    REPO,
    Ended,
    launch,
    run_ranks,
    start_ranks,
    torchrun,
    wait_for_ranks,
)

SCRIPT = REPO / "tests" / "dist" / "scripts" / "robust.py"
EXIT_RESUME = 75


def run(pool: Pool, folder: Path, *argv: str, **env: str) -> list[Ended]:
    return run_ranks(pool, SCRIPT, 2, [str(folder), *argv], env=env)


def steps_saved(results: list[Ended]) -> set[str]:
    return {found for r in results for found in re.findall(r"SAVED (\d+)", r.output)}


def words(results: list[Ended]) -> str:
    return "\n".join(f"rank {r.rank} ({r.returncode}):\n{r.output}" for r in results)


# ---- preemption --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ask", "path", "save_to"])
@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_of_one_rank_stops_all_at_one_step_and_they_resume(
    pool: Pool, tmp_path: Path, how: str, victim: int
) -> None:
    argv = ["--steps", "12", "--step-s", "0.005"] + (["--ask"] if how == "ask" else [])
    env = {"SMP_PREEMPTION_PATH": str(tmp_path)} if how == "path" else {}
    fault = f"rank={victim},step=5,kind=term"
    results = run(pool, tmp_path, *argv, SMP_FAULT=fault, **env)
    text = words(results)
    assert [r.returncode for r in results] == [EXIT_RESUME] * 2, text
    saved = steps_saved(results)
    assert len(saved) == 1 and int(next(iter(saved))) >= 5, text
    assert "SIGTERM: all ranks will stop" in results[victim].output
    again = run(pool, tmp_path, *argv, **env)
    assert [r.returncode for r in again] == [0, 0], words(again)
    assert all(f"BEGIN {next(iter(saved))}" in r.output for r in again)
    assert all('"step": 12' in r.output for r in again)


def test_sigterm_before_the_first_step_leaves_without_saving(pool: Pool, tmp_path: Path) -> None:
    results = run(pool, tmp_path, SMP_FAULT="rank=0,step=0,kind=term,microbatch=0", SMP_HANG_S="0")
    # The signal comes in the first step; the boundary is after it.
    assert [r.returncode for r in results] == [EXIT_RESUME] * 2, words(results)
    assert steps_saved(results) == {"1"}


def test_sigterm_ends_a_script_that_never_asks(pool: Pool, tmp_path: Path) -> None:
    fault = REPO / "tests" / "dist" / "scripts" / "fault.py"
    results = run_ranks(
        pool, fault, 2, ["none", "none", "0"], env={"SMP_FAULT": "rank=1,step=1,kind=term"}
    )
    assert results[1].returncode == -signal.SIGTERM, words(results)
    assert results[0].returncode not in (0, EXIT_RESUME)


def test_nothing_is_saved_after_the_death_of_a_peer(pool: Pool, tmp_path: Path) -> None:
    started = start_ranks(
        pool, SCRIPT, 2, [str(tmp_path), "--steps", "2000", "--step-s", "0.01"], timeout=40,
        env={"SMP_FAULT": "rank=1,step=4,kind=kill"},
    )  # fmt: skip
    while pool.zygote().ended(started.pids[1]) is None:
        time.sleep(0.01)
    if pool.zygote().ended(started.pids[0]) is None:
        os.kill(started.pids[0], signal.SIGTERM)  # as launchers do then
    results = wait_for_ranks(pool, started)
    assert results[0].returncode not in (0, EXIT_RESUME) and not results[0].hung, words(results)
    assert re.search(r"(?<!\[)global_rank 1 .*died", results[0].output), words(results)
    assert not list(tmp_path.iterdir())


# ---- hangs -------------------------------------------------------------------------


def test_hanging_rank_is_named_with_its_microbatch_and_stack(pool: Pool, tmp_path: Path) -> None:
    started = start_ranks(
        pool, SCRIPT, 2, [str(tmp_path)], timeout=60,
        env={"SMP_FAULT": "rank=1,step=2,kind=hang,microbatch=1", "SMP_HANG_S": "2"},
    )  # fmt: skip
    log, deadline = started.folder / "rank0.log", time.monotonic() + 40
    while "Python stacks of all ranks" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.3)
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


def test_torchrun_restarts_all_ranks_and_they_start_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_FAULT", "rank=1,step=2,kind=kill")
    command = torchrun(2)
    done = launch([*command, "--max-restarts=2", str(SCRIPT), str(tmp_path), "--steps", "4"])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("SMP_FAULT strikes: kill") == 1
    assert done.stdout.count("BEGIN 0") == 4, "two ranks, twice"
    assert done.stdout.count("RESULT") == 2


def test_smp_run_starts_preempted_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMP_FAULT", "rank=0,step=3,kind=term")
    command = [sys.executable, "-m", "smp_cli", "run", "-n", "2", "--max-restarts", "1"]
    done = launch([*command, str(SCRIPT), str(tmp_path), "--steps", "8"])
    assert done.returncode == 0, done.stdout
    assert "want to be resumed" in done.stdout
    saved = re.findall(r"SAVED (\d+)", done.stdout)
    assert len(saved) == 2 and done.stdout.count(f"BEGIN {saved[0]}") == 2, done.stdout
    assert done.stdout.count("RESULT") == 2


def test_sigterm_to_smp_run_ends_it_with_the_status_that_means_resume(
    tmp_path: Path,
) -> None:
    env = {**os.environ, "PYTHONPATH": f"{REPO / 'python'}:{REPO}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "smp_cli", "run", "-n", "2", "--max-restarts", "3", str(SCRIPT)]
        + [str(tmp_path), "--steps", "100000"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    while "STEP 3" not in output:
        output += process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    output += process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_RESUME, output
    assert len(set(re.findall(r"SAVED (\d+)", output))) == 1
    assert output.count("BEGIN") == 2, "not started again"
