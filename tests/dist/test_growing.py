"""Processes that come later make a job as large again as it was, and change nothing else.

With `SMP_GRID=all` 30 jobs lose several ranks at random times (`SMP_NUM_KILLS` sets another
number).
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import going_on
from benchmarks import spares as benchmark
from tests.dist.pool import Pool
from tests.dist.processes import Ended, Started, launch, run_ranks, start_ranks
from tests.dist.test_going_on import (
    ALL,
    DROPS,
    SCRIPT,
    Layout,
    losses_of,
    result_of,
    wait_for_first_step,
    words,
)
from tests.dist.test_spares import end
from tests.patience import wait_until

pytestmark = pytest.mark.waits

NUM_JOBS = int(os.environ.get("SMP_NUM_KILLS", "30" if ALL else "2"))
STEPS, MANY_STEPS = 8, 150
PP2 = Layout(pp=2)


class Launcher:
    """Starts a job, and processes that wait in place of those that have ended.

    Args:
        pool: zygote of the processes.
        layout: degrees of the job.
        argv: arguments of the script.
        steps: least number of steps.
        spares: processes that wait from the beginning.
        at_once: whether a process is replaced as soon as it has ended. Otherwise none is before the
            job has changed once: a process that came in time would take the place like a spare.
    """

    def __init__(
        self,
        pool: Pool,
        layout: Layout,
        *argv: str,
        steps: int = STEPS,
        spares: int = 0,
        at_once: bool = False,
    ) -> None:
        self.pool, self.layout, self.at_once = pool, layout, at_once
        self.num_ranks = layout.per_replica * layout.dp
        self.argv = [*layout.argv(on_failure="spare"), "--by-place", f"--until={self.num_ranks}"]
        self.argv += [f"--steps={steps}", "--step-s=0.03", *argv]
        env = {"SMP_SPARES": str(spares)}
        self.job: Started = start_ranks(
            pool, SCRIPT, self.num_ranks, self.argv, env=env, launcher="smp run", spares=spares
        )
        self.replaced = set[int]()

    def start_one(self) -> int:
        """Starts a process with the variables that any launcher may set; returns its number."""
        number, folder = len(self.job.pids), self.job.folder
        settings = {
            "SMP_RANK": str(number),
            "SMP_WORLD_SIZE": str(self.num_ranks),
            "SMP_SPARES": "0",
            "SMP_RENDEZVOUS": f"file://{folder}/rendezvous",
        }
        log = str(folder / f"rank{number}.log")
        zygote = self.pool.zygote()
        self.job.pids.extend(zygote.start("script", str(SCRIPT), self.argv, settings, log))
        return number

    def has_ended(self, number: int) -> bool:
        return self.pool.zygote().ended(self.job.pids[number]) is not None

    def output(self, number: int) -> str:
        log = self.job.folder / f"rank{number}.log"
        return log.read_text() if log.exists() else ""

    def outputs(self) -> str:
        return "\n".join(f"{n}: {self.output(n)}" for n in range(len(self.job.pids)))

    @property
    def is_over(self) -> bool:
        return any("RESULT " in self.output(n) for n in range(len(self.job.pids)))

    def replace_ended(self) -> None:
        """Starts a process for each that has ended before the job."""
        self.at_once = self.at_once or "RESIZED " in self.outputs()
        if not self.at_once:
            return
        for number in range(len(self.job.pids)):
            if number not in self.replaced and self.has_ended(number) and not self.is_over:
                self.replaced.add(number)
                self.start_one()

    def end(self, most: int = 100) -> list[Ended]:
        """Replaces processes, `most` in all, until the job has ended."""

        def is_over() -> bool:
            if len(self.replaced) < most:
                self.replace_ended()
            return self.is_over or all(map(self.has_ended, range(self.num_ranks)))

        wait_until(is_over, self.outputs)
        return end(self.pool, self.job, self.num_ranks)


def place_taken(ended: Ended) -> int:
    found = re.search(r"TAKEN (\d+)", ended.output)
    assert found, ended.output
    return int(found[1])


def check_as_resumed(
    pool: Pool, folder: Path, layout: Layout, ended: list[Ended]
) -> list[dict[str, Any]]:
    """Compares a job with jobs that resume, from a checkpoint, on each of its layouts.

    Returns:
        changes of the ranks that the job has noted.
    """
    results = {rank.rank: result_of(rank) for rank in ended if "RESULT " in rank.output}
    assert results, words(ended)
    resizes: list[dict[str, Any]] = max((r["resized"] for r in results.values()), key=len)
    for result in results.values():
        own = result["resized"]
        assert own == resizes[len(resizes) - len(own) :], words(ended)
    steps = {result["step"] for result in results.values()}
    assert len(steps) == 1, words(ended)
    per, members = layout.per_replica, list(range(layout.per_replica * layout.dp))
    parts = [(0, members, list(range(layout.dp)))]
    for resize in resizes:
        members, before = changed(members, resize, per, ended)
        assert len(members) == per * resize["sizes"][1] // layout.tp, words(ended)
        # The batch of a step that is run again is that of the place before.
        reads = parts[-1][2] if parts[-1][0] == resize["step"] else list(range(layout.dp))
        reads = [number if old < 0 else reads[old] for number, old in enumerate(before)]
        parts.append((resize["step"], members, reads))
    assert sorted(results) == sorted(members), words(ended)
    alike: list[Ended] = []
    ends = [*(begin for begin, *_ in parts[1:]), *steps]
    for (begin, members, reads), last in zip(parts, ends, strict=True):
        if begin == last:
            continue
        argv = [f"--steps={last}", "--by-place", f"--first-reads={','.join(map(str, reads))}"]
        argv += [f"--resume={folder}/{begin}"] * (begin > 0)
        argv += [f"--save={folder}/{last}"] * (last not in steps)
        alike = run_ranks(pool, SCRIPT, len(members), [*layout.argv(), *argv])
        assert not any(rank.returncode for rank in alike), words(alike)
        for place, number in enumerate(members):
            found = {s: x for s, x in losses_of(ended[number]).items() if begin <= s < last}
            expected = losses_of(alike[place])
            assert found == {s: expected[s] for s in found}, words([ended[number], alike[place]])
            # A rank may die between the end of a step and its report.
            assert len(found) >= last - begin - (number not in results), words(ended)
    for number, result in results.items():
        assert result["rank"] == members.index(number)
        expected_result = result_of(alike[result["rank"]])
        assert result["digest"] == expected_result["digest"], words(ended)
        assert result["rate"] == expected_result["rate"]
    return resizes


def changed(
    members: list[int], resize: dict[str, Any], per: int, ended: list[Ended]
) -> tuple[list[int], list[int]]:
    """Returns the process at each place after a change, and the place of each replica before."""
    replicas = list(range(len(members) // per))
    before, after = resize["sizes"]
    if before < after:
        assert not resize["lost"]
        new_ones = sorted(resize["newcomers"], key=lambda number: place_taken(ended[number]))
        places = [place_taken(ended[number]) for number in new_ones]
        assert places == list(range(len(members), len(members) + per)), "behind the others"
        return [*members, *new_ones], [*replicas, -1]
    new = {place_taken(ended[number]): number for number in resize["newcomers"]}
    lost, found = set(resize["lost"]), []
    for kept in combinations(replicas, len(replicas) * after // before):  # tp counts in dp_size
        old = [number for one in kept for number in members[one * per : one * per + per]]
        now = [new.get(place, number) for place, number in enumerate(old)]
        are_replaced = len(new.keys() & range(len(old))) == len(new)
        if are_replaced and {old[place] for place in new} <= lost and not set(now) & lost:
            # The data of a replica are read by its first process.
            found.append((now, [-1 if i * per in new else one for i, one in enumerate(kept)]))
    assert len(found) == 1, f"{found}\n{resize}\n{words(ended)}"
    return found[0]


def sizes(resizes: list[dict[str, Any]]) -> list[list[int]]:
    return [resize["sizes"] for resize in resizes]


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("layout", "deaths"),
    [
        (PP2, ["3:backward:2"]),
        (Layout(), ["0:sum:2"]),
        (Layout(tp=2), ["1:backward:2"]),
        (Layout(pp=2, keys=(("fp16", True),)), ["0:backward:3"]),
        (Layout(pp=2, flags=("--norm",)), ["2:forward:2"]),
        (Layout(pp=2, dp=3), ["1:forward:2"]),
        (Layout(keys=(("bf16", True),)), ["1:summed:2"]),
        (Layout(pp=2, keys=DROPS, flags=("--dropout=0.3",)), ["1:backward:2"]),
        (Layout(tp=2, flags=("--double",)), ["3:forward:2"]),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_processes_that_come_later_make_the_job_whole(
    pool: Pool, tmp_path: Path, layout: Layout, deaths: list[str]
) -> None:
    launcher = Launcher(pool, layout, *(f"--die={death}" for death in deaths))
    ended = launcher.end()
    shrunken, grown = check_as_resumed(pool, tmp_path, layout, ended)
    per, num_ranks = layout.per_replica, launcher.num_ranks
    assert shrunken["newcomers"] == [] and len(shrunken["lost"]) == per
    assert grown["lost"] == [] and grown["step"] > shrunken["step"]
    assert grown["newcomers"] == list(range(num_ranks, num_ranks + per))
    whole = layout.dp * layout.tp
    assert sizes([shrunken, grown]) == [[whole, whole - layout.tp], [whole - layout.tp, whole]]
    joined = f"the processes {grown['newcomers']} have joined: dp_size {whole - layout.tp} -> "
    assert joined in words(ended)


def test_three_replicas_shrink_to_one_and_grow_back(pool: Pool, tmp_path: Path) -> None:
    layout = Layout(dp=3)
    launcher = Launcher(pool, layout, "--die=0:backward:2", "--die=2:forward:3")
    ended = launcher.end()
    resizes = check_as_resumed(pool, tmp_path, layout, ended)
    assert sizes(resizes)[-1] == [2, 3], words(ended)
    # A process that has a place of a larger job does not take that of a rank that dies then.
    newcomers = [number for resize in resizes for number in resize["newcomers"]]
    assert len(newcomers) == 2 and set(newcomers) <= {3, 4, 5}


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("death", ["4:entered:0", "5:built:0", "4:taken:0", "5:connect:0"])
def test_a_death_while_processes_join_is_no_end(pool: Pool, tmp_path: Path, death: str) -> None:
    launcher = Launcher(pool, PP2, "--die=3:backward:2", f"--die={death}")
    ended = launcher.end()
    resizes = check_as_resumed(pool, tmp_path, PP2, ended)
    victim = int(death.partition(":")[0])
    assert "AT " in ended[victim].output and ended[victim].returncode == -signal.SIGKILL
    assert sizes(resizes)[0] == [2, 1] and sizes(resizes)[-1] == [1, 2], words(ended)
    assert victim not in resizes[-1]["newcomers"]


def test_a_spare_takes_a_place_and_later_ones_wait_for_the_next(pool: Pool, tmp_path: Path) -> None:
    deaths = ["--die=3:backward:2", "--die=1:forward:5"]
    ended = Launcher(pool, PP2, *deaths, spares=1).end()
    resizes = check_as_resumed(pool, tmp_path, PP2, ended)
    assert resizes[0]["newcomers"] == [4] and len(resizes) > 1, words(ended)
    assert sizes(resizes)[0] == [2, 2] and sizes(resizes)[-1][1] == 2, words(ended)


def test_a_save_in_the_background_goes_on_while_processes_join(pool: Pool, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    launcher = Launcher(pool, PP2, "--die=3:backward:2", f"--save-each={saves}", "--slow-saves")
    ended = launcher.end()
    resizes = check_as_resumed(pool, tmp_path, PP2, ended)
    grown = resizes[-1]
    assert grown["sizes"] == [1, 2]
    assert f"UNSAVED {grown['step']}" not in words(ended)
    assert (saves / f"after{grown['step']}_partial").exists()


def test_unused_gradients_put_growing_off(pool: Pool, tmp_path: Path) -> None:
    layout = Layout(pp=2, flags=("--twice",))
    ended = Launcher(pool, layout, "--die=3:backward:2").end()
    resizes = check_as_resumed(pool, tmp_path, layout, ended)
    assert sizes(resizes) == [[2, 1], [1, 2]]


def smp_run(folder: Path, *argv: str, options: list[str]) -> tuple[Any, list[Ended]]:
    """Runs a job of pp 2 x dp 2; returns the launcher's end, and the output of each process."""
    command = [sys.executable, "-m", "smp_cli", "run", "-n", "4", f"--log-dir={folder}/logs"]
    words = [*PP2.argv(on_failure="spare"), "--by-place", "--until=4", "--step-s=0.03"]
    job = launch([*command, *options, str(SCRIPT), *words, f"--steps={STEPS}", *argv])
    logs = sorted((folder / "logs").iterdir(), key=lambda path: int(path.stem[4:]))
    assert [log.stem for log in logs] == [f"rank{number}" for number in range(len(logs))]
    return job, [Ended(n, 0, 0.0, log.read_text()) for n, log in enumerate(logs)]


def test_smp_run_replaces_dead_and_dismissed_processes(pool: Pool, tmp_path: Path) -> None:
    job, ended = smp_run(
        tmp_path, "--die=3:backward:2", options=["--max-replacements=3"]
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    assert "smp run: process 4 is started in place of 3, and waits (1 of 3)" in job.stdout
    assert "smp run: process 5 is started in place of 2, and waits (2 of 3)" in job.stdout
    assert "without the ranks [2, 3], which it has lost; [4, 5] have taken places" in job.stdout
    resizes = check_as_resumed(pool, tmp_path, PP2, ended)
    assert sizes(resizes) == [[2, 1], [1, 2]] and resizes[1]["newcomers"] == [4, 5]


def test_smp_run_replaces_no_more_than_it_may(tmp_path: Path) -> None:
    job, _ = smp_run(
        tmp_path, "--die=3:backward:2", "--until=2", options=["--max-replacements=1"]
    )  # fmt: skip
    assert job.returncode == 0 and "(1 of 1)" in job.stdout, job.stdout
    assert "process 5" not in job.stdout, job.stdout


LAYOUTS = (Layout(pp=2), Layout(dp=3), Layout(tp=2), Layout(pp=2, dp=3))


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("index", range(NUM_JOBS))
def test_jobs_that_lose_several_ranks_end_whole(pool: Pool, tmp_path: Path, index: int) -> None:
    dice = random.Random(3000 * int(os.environ["SMP_GRID_SEED"]) + index)
    layout = LAYOUTS[index % len(LAYOUTS)]
    launcher = Launcher(pool, layout, steps=MANY_STEPS, spares=dice.choice([0, 0, 1]), at_once=True)
    per = layout.per_replica
    kept = dice.randrange(layout.dp)  # else there may be no whole replica
    for number in range(launcher.num_ranks):
        wait_for_first_step(pool, launcher.job, number)
    killed = list[int]()
    for _ in range(dice.choice([2, 3, 4])):
        pause_until(time.monotonic() + dice.uniform(0.0, 2.0), launcher.replace_ended)
        living = [
            number for number in range(len(launcher.job.pids))
            if not launcher.has_ended(number) and number // per != kept
        ]  # fmt: skip
        if living and not launcher.is_over:
            killed.append(dice.choice(living))
            pool.zygote().kill(launcher.job.pids[killed[-1]])
    ended = launcher.end()
    assert killed and all(ended[number].returncode == -signal.SIGKILL for number in killed)
    check_as_resumed(pool, tmp_path, layout, ended)
    whole = [rank for rank in ended if "RESULT " in rank.output]
    assert len(whole) == launcher.num_ranks, words(ended)


@pytest.mark.sample(keep=0)
def test_benchmark_measures_each_part_of_growing(pool: Pool) -> None:
    parts = benchmark.growing(pool)
    assert all(parts[name] > 0 for name in going_on.PARTS if name != "notice")


def pause_until(end_s: float, act: Callable[[], None]) -> None:
    while time.monotonic() < end_s:
        act()
        time.sleep(0.05)
