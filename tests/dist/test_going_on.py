"""Ranks are lost, and the others go on as a job that resumes from the step before.

With `SMP_GRID=all` 200 ranks are killed at random times (`SMP_NUM_KILLS` sets another number).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import going_on
from tests.dist.pool import Pool
from tests.dist.processes import (
    REPO,
    Ended,
    Started,
    launch,
    run_ranks,
    start_ranks,
    wait_for_ranks,
)
from tests.patience import wait_until

pytestmark = pytest.mark.waits

SCRIPT = REPO / "tests" / "dist" / "scripts" / "going_on.py"
ALL = os.environ.get("SMP_GRID") == "all"
NUM_KILLS = int(os.environ.get("SMP_NUM_KILLS", "200" if ALL else "8"))
STEPS, MANY_STEPS = 6, 60
EXIT_RESUME = 75


@dataclass(frozen=True)
class Layout:
    """Degrees of a job, and what else its configuration has."""

    pp: int = 1
    tp: int = 1
    dp: int = 2
    keys: tuple[tuple[str, object], ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def per_replica(self) -> int:
        return self.pp * self.tp

    def argv(self, **keys: object) -> list[str]:
        config = {"pipeline_parallel_degree": self.pp, "tensor_parallel_degree": self.tp}
        return [f"--config={json.dumps({**config, **dict(self.keys), **keys})}", *self.flags]


def words(results: list[Ended]) -> str:
    return "\n".join(f"rank {r.rank} ({r.returncode}):\n{r.output}" for r in results)


def result_of(ended: Ended) -> dict[str, Any]:
    found = re.search(r"RESULT (\{.*\})", ended.output)
    assert found and ended.returncode == 0, f"rank {ended.rank}:\n{ended.output}"
    result: dict[str, Any] = json.loads(found[1])
    return result


def losses_of(ended: Ended) -> dict[int, str]:
    found = re.findall(r"STEP (\d+) (.*)", ended.output)
    assert len(found) == len(dict(found)), f"a step ran twice:\n{ended.output}"
    return {int(step): losses for step, losses in found}


def check_as_resumed(
    pool: Pool, folder: Path, layout: Layout, ended: list[Ended], steps: int = STEPS
) -> list[dict[str, Any]]:
    """Compares a job that has lost ranks with jobs that resume on its later layouts.

    Returns:
        what the ranks that went on have noted about each loss.
    """
    kept = [rank for rank in ended if "RESULT " in rank.output]
    assert kept, words(ended)
    results = [result_of(rank) for rank in kept]
    resizes: list[dict[str, Any]] = results[0]["resized"]
    assert resizes and all(result["resized"] == resizes for result in results), words(ended)
    replicas, per = list(range(layout.dp)), layout.per_replica
    begins = [0, *(resize["step"] for resize in resizes)]
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], steps], strict=True)):
        if number:
            lost = {rank // per for rank in resizes[number - 1]["lost"]}
            assert lost < set(replicas), "whole replicas are lost"
            replicas = [replica for replica in replicas if replica not in lost]
        if begin == end:
            continue  # several were lost in one step
        argv = [f"--steps={end}", f"--reads={','.join(map(str, replicas))}"]
        argv += [f"--resume={folder}/{begin}"] * (begin > 0)
        argv += [f"--save={folder}/{end}"] * (end < steps)
        alike = run_ranks(pool, SCRIPT, per * len(replicas), [*layout.argv(), *argv])
        assert not any(rank.returncode for rank in alike), words(alike)
        for rank in kept:
            own = alike[replicas.index(rank.rank // per) * per + rank.rank % per]
            for step in range(begin, end):
                assert losses_of(rank)[step] == losses_of(own)[step], (
                    f"{step}: {words([rank, own])}"
                )
    assert len(kept) == per * len(replicas), words(ended)
    for result in results:
        expected = result_of(alike[result["rank"]])
        assert result["digest"] == expected["digest"] and result["rate"] == expected["rate"]
    return resizes


def run_and_lose(
    pool: Pool, layout: Layout, *deaths: str, env: dict[str, str] | None = None
) -> list[Ended]:
    """Runs a job in which ranks die, as given by `RANK:PLACE:STEP`."""
    argv = [*layout.argv(on_failure="shrink"), f"--steps={STEPS}"]
    argv += [f"--die={death}" for death in deaths]
    ended = run_ranks(pool, SCRIPT, layout.per_replica * layout.dp, argv, env=env)
    for death in deaths:
        assert "AT " in ended[int(death.split(":")[0])].output, f"{death}: {words(ended)}"
    return ended


PP2_DP2 = Layout(pp=2)
DROPS = (("layout_independent_dropout", True),)
# Deaths while ranks connect are known from the system, not from silence.
NEVER_SILENT = ("--never-silent",)
PLACES = (
    "forward", "backward", "sum", "summed", "confirm", "confirmed", "clip", "optimizer", "between",
    "raise",
)  # fmt: skip


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    ("place", "victim"), [(place, (number * 3 + 3) % 4) for number, place in enumerate(PLACES)]
)
def test_others_go_on_as_a_job_that_resumes_on_their_layout(
    pool: Pool, tmp_path: Path, place: str, victim: int
) -> None:
    ended = run_and_lose(pool, PP2_DP2, f"{victim}:{place}:2")
    assert ended[victim].returncode == (1 if place == "raise" else -signal.SIGKILL)
    [resize] = check_as_resumed(pool, tmp_path, PP2_DP2, ended)
    late = place in ("confirmed", "clip", "optimizer", "between")
    # A rank that dies in the confirmation may have taken part in it or not.
    assert resize["step"] in ((2, 3) if place == "confirm" else (2 + late,))
    assert resize["sizes"] == [2, 1]
    assert sorted(resize["lost"]) == [2 * (victim // 2), 2 * (victim // 2) + 1]


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    ("layout", "deaths"),
    [
        (Layout(tp=2), ["1:backward:2"]),
        (Layout(dp=3), ["0:forward:1", "2:sum:3"]),
        (Layout(pp=2, dp=3), ["0:sum:2", "5:confirm:2"]),
        (Layout(pp=2, dp=3), ["3:forward:2", "4:resize:2"]),
        (Layout(pp=2, dp=3), ["2:optimizer:1", "1:backward:4"]),
        (Layout(pp=2, dp=3, flags=NEVER_SILENT), ["3:forward:2", "4:connect:2"]),
        (Layout(pp=2, dp=3, flags=NEVER_SILENT), ["3:forward:2", "0:connect:2"]),
        (Layout(pp=2, dp=3), ["3:forward:2", "0:connected:2"]),
        (Layout(pp=2, dp=3), ["3:forward:2", "0:torch:2"]),
        (Layout(pp=2, dp=3), ["3:forward:2", "5:join:2"]),
        (Layout(dp=4), ["3:forward:2", "1:joined:2"]),
        (Layout(pp=2, flags=("--norm",)), ["0:backward:3"]),
        (Layout(pp=2, dp=3, keys=DROPS, flags=("--dropout=0.3",)), ["1:backward:2"]),
        (Layout(pp=2, keys=(("fp16", True),)), ["0:clip:3"]),
        (Layout(pp=2, keys=(("bf16", True),)), ["3:summed:3"]),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_layouts_lose_whole_replicas(
    pool: Pool, tmp_path: Path, layout: Layout, deaths: list[str]
) -> None:
    ended = run_and_lose(pool, layout, *deaths)
    resizes = check_as_resumed(pool, tmp_path, layout, ended)
    broken = {int(death.split(":")[0]) // layout.per_replica for death in deaths}
    lost = {rank // layout.per_replica for resize in resizes for rank in resize["lost"]}
    assert lost == broken


@pytest.mark.parametrize("settings", [{"SMP_TRANSPORT": "tcp"}, {"SMP_SHM": "0"}], ids=str)
def test_transports_lose_rank_0(pool: Pool, tmp_path: Path, settings: dict[str, str]) -> None:
    ended = run_and_lose(pool, PP2_DP2, "0:backward:2", env=settings)
    check_as_resumed(pool, tmp_path, PP2_DP2, ended)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("who", ["script", "library"])
@pytest.mark.parametrize("place", ["forward", "connect", "resize"])
def test_a_stop_that_is_asked_for_while_a_rank_dies_is_not_lost(
    pool: Pool, tmp_path: Path, place: str, who: str
) -> None:
    """SIGTERM comes before the others know of the death, while they connect, and afterwards."""
    flags = (f"--term=0:{place}:2", f"--leave={tmp_path}", f"--saves={who}")
    ended = run_and_lose(pool, replace(PP2_DP2, flags=flags), "3:backward:2")
    assert [rank.returncode for rank in ended[:2]] == [EXIT_RESUME] * 2, words(ended)
    done = [re.findall(r"DONE (\d+)", rank.output)[-1] for rank in ended[:2]]
    assert done[0] == done[1] and 2 <= int(done[0]) < STEPS - 1, words(ended)
    resumed = run_ranks(pool, SCRIPT, 2, [*PP2_DP2.argv(), f"--leave={tmp_path}"])
    assert all(f"RESUMED {int(done[0]) + 1}" in rank.output for rank in resumed), words(resumed)


def test_smp_run_lets_the_others_go_on_and_ends_with_0() -> None:
    argv = [*PP2_DP2.argv(on_failure="shrink"), f"--steps={STEPS}", "--die=1:backward:2"]
    job = launch([sys.executable, "-m", "smp_cli", "run", "-n", "4", str(SCRIPT), *argv])
    assert job.returncode == 0, job.stdout
    assert "smp run: rank 1 was killed by SIGKILL; the ranks [" in job.stdout, job.stdout
    assert "smp run: the job has finished without the ranks [0, 1], which it has lost" in job.stdout
    assert "dp_size 2 -> 1 (agree " in job.stdout
    assert len(re.findall(r"RESULT ", job.stdout)) == 2


def test_smp_run_ends_with_the_status_of_the_culprit_if_no_replica_is_whole() -> None:
    argv = [*PP2_DP2.argv(on_failure="shrink"), f"--steps={STEPS}"]
    argv += ["--die=1:backward:2", "--die=3:backward:3"]
    job = launch([sys.executable, "-m", "smp_cli", "run", "-n", "4", str(SCRIPT), *argv])
    assert job.returncode == 128 + signal.SIGKILL, job.stdout
    assert "smp run: rank 3 was killed by SIGKILL" in job.stdout, job.stdout


def test_a_loss_in_a_collective_call_of_the_script_ends_all_and_is_named(pool: Pool) -> None:
    layout = Layout(pp=2, flags=("--barrier",))
    ended = run_and_lose(pool, layout, "3:barrier:2")
    for rank in ended[:3]:
        assert not rank.hung and rank.returncode not in (0, None), words(ended)
        assert "global_rank 3 (pp 1 tp 0 rdp 1) died" in rank.output, rank.output


def test_a_loss_in_the_first_step_ends_all_with_the_reason(pool: Pool) -> None:
    ended = run_and_lose(pool, PP2_DP2, "3:forward:0")
    for rank in ended[:2]:
        assert not rank.hung and rank.returncode not in (0, None), words(ended)
        assert "because it is the first call of this function" in rank.output, rank.output


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("victim", [1, 3])
def test_a_save_that_has_lost_a_rank_leaves_no_checkpoint_and_later_saves_do(
    pool: Pool, tmp_path: Path, victim: int
) -> None:
    layout = Layout(pp=2, flags=(f"--save-each={tmp_path}", "--slow-save=3"))
    ended = run_and_lose(pool, layout, f"{victim}:backward:3")
    for rank in ended[2:] if victim == 1 else ended[:2]:
        result_of(rank)
        assert len(re.findall(r"UNSAVED 3 saving in the background failed", rank.output)) == 1
    saved = sorted(path.name for path in tmp_path.glob("after*"))
    assert saved == [f"after{step}_partial" for step in (1, 2, 4, 5, 6)]
    argv = [*PP2_DP2.argv(), f"--resume={tmp_path}", "--steps=7", "--reads=0"]
    resumed = run_ranks(pool, SCRIPT, 2, argv)
    assert [list(losses_of(rank)) for rank in resumed] == [[STEPS], [STEPS]], words(resumed)


@pytest.mark.sample(keep=0)
def test_an_error_of_all_ranks_ends_all(pool: Pool) -> None:
    deaths = [f"--die={rank}:raise:2" for rank in range(4)]
    ended = run_ranks(pool, SCRIPT, 4, [*PP2_DP2.argv(on_failure="shrink"), *deaths])
    assert any("ZeroDivisionError: the layer broke" in rank.output for rank in ended), words(ended)
    assert any(rank.returncode == 1 for rank in ended), words(ended)
    for rank in ended:
        assert not rank.hung and "RESULT" not in rank.output, words(ended)


def wake_when_others_have_ended(pool: Pool, job: Started, replica: int, layout: Layout) -> None:
    """Lets a stopped rank of a replica go on when the ranks of other replicas have a result."""
    ranks = [rank for rank in range(len(job.pids)) if rank // layout.per_replica != replica]
    logs = [job.folder / f"rank{rank}.log" for rank in ranks]
    wait_until(
        lambda: all(log.exists() and "RESULT " in log.read_text() for log in logs),
        lambda: "\n".join(log.read_text() for log in logs),
    )
    for pid in job.pids:
        if pool.zygote().ended(pid) is None:
            os.kill(pid, signal.SIGCONT)


def test_a_rank_that_was_stopped_for_too_long_is_refused_when_it_comes_back(
    pool: Pool, tmp_path: Path
) -> None:
    argv = [*PP2_DP2.argv(on_failure="shrink"), f"--steps={STEPS}", "--die=1:stop:2"]
    job = start_ranks(pool, SCRIPT, 4, argv, env={"SMP_HANG_S": "1"})
    wake_when_others_have_ended(pool, job, 0, PP2_DP2)
    ended = wait_for_ranks(pool, job)
    assert not any(rank.hung for rank in ended), words(ended)
    assert "STEP 2 " not in ended[1].output, ended[1].output
    [resize] = check_as_resumed(pool, tmp_path, PP2_DP2, ended)
    assert resize["lost"] == [0, 1]


@pytest.mark.sample(keep=0)
def test_benchmark_measures_each_part_of_a_stall(pool: Pool) -> None:
    result = going_on.summarise_stall([going_on.stall(pool, "forward", 1)])
    parts = [result[f"{name}_s"] for name in going_on.PARTS]
    assert all(part > 0 for part in parts)
    assert result["median_s"] == result["worst_s"] == pytest.approx(sum(parts))


MEANS = (signal.SIGKILL, signal.SIGKILL, signal.SIGUSR1, signal.SIGSTOP)
HANG = {"SMP_HANG_S": "2"}  # a rank that is stopped for twice as long is lost
RANDOM_LAYOUTS = (Layout(pp=2), Layout(pp=2, dp=3), Layout(dp=3), Layout(tp=2), Layout(pp=3))


def wait_for_first_step(pool: Pool, job: Started, number: int) -> None:
    """Waits until a process has ended its first step."""
    log = job.folder / f"rank{number}.log"
    wait_until(
        lambda: log.exists() and "STEP 0 " in log.read_text(),
        log.read_text,
        lambda: pool.zygote().ended(job.pids[number]) is None,
        pause_s=0.01,
    )


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("index", range(NUM_KILLS))
def test_random_kills_lose_nothing(pool: Pool, tmp_path: Path, index: int) -> None:
    dice = random.Random(1000 * int(os.environ["SMP_GRID_SEED"]) + index)
    layout = RANDOM_LAYOUTS[index % len(RANDOM_LAYOUTS)]
    num_ranks = layout.per_replica * layout.dp
    victim = dice.randrange(num_ranks)
    argv = [*layout.argv(on_failure="shrink"), f"--steps={MANY_STEPS}", "--step-s=0.03"]
    means = MEANS[index // len(RANDOM_LAYOUTS) % len(MEANS)]
    job = start_ranks(pool, SCRIPT, num_ranks, argv, env=HANG if means == signal.SIGSTOP else None)
    wait_for_first_step(pool, job, victim)
    time.sleep(dice.uniform(0.0, 1.0))
    assert pool.zygote().ended(job.pids[victim]) is None, "it lives"
    os.kill(job.pids[victim], means)
    if means == signal.SIGSTOP:
        wake_when_others_have_ended(pool, job, victim // layout.per_replica, layout)
    ended = wait_for_ranks(pool, job)
    # A stopped rank that comes back finds a decision, or the news that it was stuck.
    statuses = {signal.SIGKILL: [-signal.SIGKILL], signal.SIGUSR1: [1], signal.SIGSTOP: [0, 1]}
    assert ended[victim].returncode in statuses[means], ended[victim].output
    assert "RESULT " not in ended[victim].output
    [resize] = check_as_resumed(pool, tmp_path, layout, ended, MANY_STEPS)
    assert victim in resize["lost"] and len(resize["lost"]) == layout.per_replica
