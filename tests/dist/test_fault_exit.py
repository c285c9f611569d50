"""A failing rank leaves no rank waiting; every rank names it, and what has noticed the failure.

`benchmarks/faults.py` measures how long this takes.
"""

from __future__ import annotations

import re
import signal

import pytest

from benchmarks import faults
from tests.dist.pool import Pool
from tests.dist.processes import (
    REPO,
    Ended,
    Started,
    launch,
    mpirun,
    run_ranks,
    start_ranks,
    wait_for_ranks,
)

pytestmark = pytest.mark.waits

SCRIPT = REPO / "tests" / "dist" / "scripts" / "fault.py"


def run(pool: Pool, action: str, place: str, victim: int, pp: int = 2, dp: int = 1) -> list[Ended]:
    argv = [action, place, str(victim), f"--pp={pp}", f"--dp={dp}"]
    return run_ranks(pool, SCRIPT, pp * dp, argv)


def check_came_to_the_fault(victim: Ended) -> None:
    assert re.search(r"^FAULT ", victim.output, re.MULTILINE), victim.output


def check_survivors(results: list[Ended], victim: int, pp: int, name: str, *words: str) -> None:
    """Every other rank exits, not with 0, naming the culprit and what happened to it."""
    check_came_to_the_fault(results[victim])
    for result in results:
        if result.rank == victim:
            continue
        where = f"{name}, survivor {result.rank}:\n{result.output}"
        assert not result.hung, f"hangs: {where}"
        assert result.returncode not in (0, -signal.SIGKILL), f"{result.returncode}: {where}"
        # Not in brackets: those hold the rank that prints.
        assert re.search(rf"(?<!\[)global_rank {victim}\b", result.output), (
            f"culprit not named: {where}"
        )
        assert coordinates(victim, pp) in result.output, f"no coordinates: {where}"
        for word in words:
            assert re.search(word, result.output), f"no '{word}': {where}"


def coordinates(rank: int, pp: int) -> str:
    """A rank and its place, as errors name it; neighbours are the parts of one pipeline."""
    return f"global_rank {rank} (pp {rank % pp} tp 0 rdp {rank // pp})"


WORLDS = [(2, 1, victim) for victim in range(2)] + [(2, 2, victim) for victim in range(4)]
in_each_world = pytest.mark.parametrize(("pp", "dp", "victim"), WORLDS)


@pytest.mark.sample(keep=4)
@pytest.mark.covering(times=1)
@in_each_world
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_killed_rank_is_named_by_all_others(
    pool: Pool, place: str, pp: int, dp: int, victim: int
) -> None:
    results = run(pool, "kill", place, victim, pp, dp)
    assert results[victim].returncode == -signal.SIGKILL
    name = f"kill -9 of rank {victim} of {pp * dp} in {place}"
    check_survivors(results, victim, pp, name, r"\bdied\b")


@pytest.mark.sample(keep=3)
@pytest.mark.covering(times=1)
@in_each_world
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_exception_in_a_module_is_named_by_all_others(
    pool: Pool, place: str, pp: int, dp: int, victim: int
) -> None:
    results = run(pool, "raise", place, victim, pp, dp)
    assert results[victim].returncode not in (0, None)
    assert "ZeroDivisionError" in results[victim].output
    assert "fault.py" in results[victim].output, "the traceback leads to the user's line"
    layer = victim % pp
    # The root's own children are plain calls: the driver knows the microbatch
    # only, an owner knows the module that it was asked to run.
    words = ["the layer broke", r"microbatch 2\b"]
    if layer:
        words.append(rf"\b{layer}\b")
    name = f"exception on rank {victim} of {pp * dp} in {place}"
    check_survivors(results, victim, pp, name, *words)


WAITING = [("exit", "between"), ("exit", "forward"), ("none", "fewer"), ("barrier", "between")]


SLOW = [(place, victim) for place in ("forward", "backward", "between") for victim in (0, 1)]


@pytest.fixture(scope="module", autouse=True)
def slow_jobs(pool: Pool) -> dict[tuple[str, int], Started]:
    """Ranks that sleep for 8 s; they do so while other tests of this file run."""
    return {
        (place, victim): start_ranks(pool, SCRIPT, 2, ["sleep", place, str(victim)])
        for place, victim in SLOW
    }


WaitingRuns = dict[tuple[str, str, int], list[Ended]]


@pytest.fixture(scope="module")
def waiting_runs(pool: Pool) -> WaitingRuns:
    """Runs that take their time to notice a fault; all at once, they mostly wait."""
    started = {
        (action, place, victim): start_ranks(pool, SCRIPT, 2, [action, place, str(victim)])
        for action, place in WAITING
        for victim in (0, 1)
    }
    return {key: wait_for_ranks(pool, job) for key, job in started.items()}


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["between", "forward"])
def test_exiting_rank_is_named_by_all_others(
    waiting_runs: WaitingRuns, place: str, victim: int
) -> None:
    results = waiting_runs["exit", place, victim]
    assert results[victim].returncode != 0
    check_survivors(results, victim, 2, f"sys.exit(3) of rank {victim} in {place}")


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_with_fewer_steps_is_named(waiting_runs: WaitingRuns, victim: int) -> None:
    results = waiting_runs["none", "fewer", victim]
    check_survivors(results, victim, 2, f"rank {victim} makes fewer steps")


@pytest.mark.parametrize("victim", [0, 1])
def test_mismatching_config_ends_all_ranks(pool: Pool, victim: int) -> None:
    results = run(pool, "none", "config", victim)
    check_came_to_the_fault(results[victim])
    for result in results:
        assert not result.hung and result.returncode != 0, result.output
        assert "microbatches" in result.output, result.output


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_in_a_barrier_while_others_step_is_a_deadlock(
    waiting_runs: WaitingRuns, victim: int
) -> None:
    results = waiting_runs["barrier", "between", victim]
    check_came_to_the_fault(results[victim])
    for result in results:
        assert not result.hung, f"rank {result.rank} hangs:\n{result.output}"
        assert result.returncode != 0 and "barrier" in result.output, result.output
        assert "deadlock: every rank waits" in result.output, result.output


@pytest.mark.parametrize(("place", "victim"), SLOW)
def test_slow_rank_is_not_reported(
    pool: Pool, slow_jobs: dict[tuple[str, int], Started], place: str, victim: int
) -> None:
    results = wait_for_ranks(pool, slow_jobs[place, victim])
    check_came_to_the_fault(results[victim])
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.output}"
        assert "FINISHED" in result.output
        text = result.output.replace("FAULT ", "")
        assert not re.search("(?i)fault|died|deadlock|error", text), result.output


@pytest.mark.sample(keep=0)
def test_benchmark_of_faults_measures_when_the_victim_is_named(pool: Pool) -> None:
    seconds = [faults.measure(pool, faults.CASES[name], 1) for name in ("raise", "deadlock")]
    assert all(0 < named <= gone for named, gone in seconds)
    result = faults.summarise("deadlock", seconds[1:])
    assert result["ratio_to_limit"] == seconds[1][0] / faults.DEADLOCK_S >= 1


# test_robustness.py kills a rank under torchrun.
@pytest.mark.sample(keep=0)
def test_mpirun_shows_the_culprit() -> None:
    command = mpirun(2)
    if command is None:
        pytest.skip("no mpirun on this machine")
    result = launch([*command, str(SCRIPT), "raise", "forward", "1"])
    assert result.returncode != 0, result.stdout
    assert "who    global_rank 1 (pipeline stage 1): ZeroDivisionError" in result.stdout, (
        result.stdout
    )
    assert "the layer broke" in result.stdout, result.stdout
