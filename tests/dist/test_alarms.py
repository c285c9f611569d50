"""Alarms that were missed, or named another rank: stopped, looping, leaving and signalled ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import NamedTuple

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import (
    REPO,
    Ended,
    Started,
    run_ranks,
    stacks_of,
    start_ranks,
    wait_for_ranks,
)
from tests.patience import wait_until

pytestmark = pytest.mark.waits

SCRIPT = REPO / "tests" / "dist" / "scripts" / "alarm.py"
HANG_S = 3.0


class SlowJobs(NamedTuple):
    """Jobs that wait for half a minute; the other tests of this file go on beside them."""

    without_folder: Started
    with_a_killed_rank: Started


@pytest.fixture(scope="module", autouse=True)
def slow_jobs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> SlowJobs:
    place = f"file://{tmp_path_factory.mktemp('alarms')}/missing/rendezvous"
    without_folder = start_ranks(pool, SCRIPT, 2, ["none", "0"], env={"SMP_RENDEZVOUS": place})
    with_a_killed_rank = start_ranks(pool, SCRIPT, 3, ["init", "1"])
    wait_for_pulses(with_a_killed_rank, [1])
    os.kill(with_a_killed_rank.pids[1], signal.SIGKILL)
    return SlowJobs(without_folder, with_a_killed_rank)


def output(started: Started, rank: int) -> str:
    log = started.folder / f"rank{rank}.log"
    return (log.read_text() if log.exists() else "") + stacks_of(started).get(rank, "")


def wait_for(started: Started, pattern: str, ranks: list[int]) -> None:
    """Returns when one of the ranks has printed a pattern."""
    wait_until(
        lambda: any(re.search(pattern, output(started, rank)) for rank in ranks),
        lambda: f"'{pattern}' in\n" + "\n".join(output(started, rank) for rank in ranks),
    )


def wait_for_pulses(started: Started, ranks: list[int]) -> None:
    """Returns when ranks wait in `smp.init`: the store at which they meet has their pulses."""
    file = started.folder / "rendezvous"
    keys = [f"pulse/{rank}".encode() for rank in ranks]
    wait_until(
        lambda: file.exists() and all(key in file.read_bytes() for key in keys),
        lambda: [output(started, rank) for rank in ranks],
    )


def wait_for_ends(pool: Pool, started: Started, ranks: list[int]) -> None:
    wait_until(
        lambda: all(pool.zygote().ended(started.pids[rank]) is not None for rank in ranks),
        lambda: [output(started, rank) for rank in ranks],
    )


def end(pool: Pool, started: Started) -> list[Ended]:
    for pid in started.pids:
        pool.zygote().kill(pid)
    return wait_for_ranks(pool, started)


def names(rank: int) -> str:
    """A pattern: the rank, not in brackets, which hold the rank that prints."""
    return rf"(?<!\[)global_rank {rank} \(pp"


# ---- ranks that are stopped or loop ---------------------------------------------------


def check_reported_first(results: list[Ended], report: str) -> None:
    """Checks that a rank reports after `SMP_HANG_S`, before anything else ends the run."""
    text = next(result.output for result in results if re.search(report, result.output))
    found = re.search(rf"nothing has moved for [\d.]+ s \(SMP_HANG_S\)[^=]*?{report}", text)
    assert found and "is stuck" not in text[: found.end()], text


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_reported_by_the_watch(pool: Pool, pp: int, victim: int) -> None:
    """After `SMP_HANG_S`, before the run ends. Rank 0 holds the hub, so others have to notice."""
    started = start_ranks(
        pool, SCRIPT, pp, ["stop", str(victim), f"--pp={pp}"], env={"SMP_HANG_S": str(HANG_S)}
    )
    wait_for(started, "^AT |\nAT ", [victim])
    others = [rank for rank in range(pp) if rank != victim]
    report = names(victim) + ".*HAS SAID NOTHING"
    wait_for(started, report, others)
    if victim == 0:
        wait_for(started, "in train_step|in main", others)  # with the rank's stack
    results = end(pool, started)
    check_reported_first([results[rank] for rank in others], report)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("pp", [2, 4])
def test_looping_rank_is_shown_with_its_line(pool: Pool, pp: int) -> None:
    started = start_ranks(
        pool, SCRIPT, pp, ["loop", "1", f"--pp={pp}"], env={"SMP_HANG_S": str(HANG_S)}
    )
    wait_for(started, "^AT |\nAT ", [1])
    # The line names the file, which has the stacks by then.
    wait_for(started, "Python stacks of all ranks: /", [0])
    result = end(pool, started)[0]
    text = result.output
    check_reported_first([result], names(1) + ".*DOES NOT WAIT")
    stacks = text.split("Python stacks of all ranks:\n")[1].split("---- global_rank ")[1:]
    for rank in range(pp):
        own = next(stack for stack in stacks if stack.startswith(f"{rank}\n"))
        # The script's own thread comes first, and no thread is shown that shows nothing.
        assert own.splitlines()[1].startswith("Thread of the script"), text
        assert "alarm.py" in own and "no Python frame" not in own, text
    assert "in misbehave" in next(stack for stack in stacks if stack.startswith("1\n")), text


# ---- and end the run ------------------------------------------------------------------


def wait_for_others(pool: Pool, started: Started, victim: int) -> list[Ended]:
    """The ends of the other ranks; the victim, which is stopped, is killed then."""
    wait_for_ends(pool, started, [rank for rank in range(len(started.pids)) if rank != victim])
    pool.zygote().kill(started.pids[victim])
    return [result for result in wait_for_ranks(pool, started) if result.rank != victim]


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [2, 1])
def test_looping_rank_ends_the_run_with_its_lines_in_the_error(pool: Pool, pp: int) -> None:
    results = run_ranks(pool, SCRIPT, 2, ["loop", "1", f"--pp={pp}"], env={"SMP_HANG_S": "2"})
    for result in results:
        text = f"rank {result.rank} ({result.returncode}):\n{result.output}"
        assert not result.hung and result.returncode == 1, text
    error = results[0].output.split("PeerFailure: ")[-1]
    place = "pp 1 tp 0 rdp 0" if pp == 2 else "pp 0 tp 0 rdp 1"
    assert f"global_rank 1 ({place}) is stuck: it has neither waited nor moved for" in error, error
    assert re.search(r"alarm.py.* in misbehave", error), error
    assert "microbatch 0" in error, "what it worked on"
    assert "Native stack of " in results[0].output, "below Python it runs"
    assert "the run ends when this has lasted 4.0 s" in results[0].output
    own = results[1].output
    if pp == 2:  # the loop is in a thread of the pipeline, which nothing can interrupt
        assert "this rank ends without its script" in own, own
    else:
        assert "in misbehave" in own and "PeerFailure" in own, own


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("victim", [1, 0])
def test_stopped_rank_ends_the_others(pool: Pool, victim: int) -> None:
    started = start_ranks(pool, SCRIPT, 3, ["stop", str(victim), "--pp=3"], env={"SMP_HANG_S": "3"})
    for result in wait_for_others(pool, started, victim):
        text = f"rank {result.rank} ({result.returncode}):\n{result.output}"
        assert not result.hung and result.returncode == 1, text
        error = result.output.split("PeerFailure: ")[-1]
        named = rf"(?<!\[)global_rank {victim} " + r"\(pp \d tp 0 rdp 0\) is stuck"
        assert re.search(named, error), text
        if victim:
            pid = started.pids[victim]
            assert f"process {pid} is stopped; kill -CONT {pid} lets it go on" in error, text


@pytest.mark.sample(keep=0)
def test_slow_rank_is_not_ended_and_report_alone_ends_nothing(pool: Pool) -> None:
    """The slow one moves within twice 3 s; without an end, a loop is reported again and again."""
    looping = start_ranks(
        pool, SCRIPT, 2, ["loop", "1", "--pp=2"],
        env={"SMP_HANG_S": "1", "SMP_HANG_ACTION": "report"},
    )  # fmt: skip
    slow = run_ranks(pool, SCRIPT, 2, ["slow", "1"], env={"SMP_HANG_S": "3"})
    for result in slow:
        assert result.returncode == 0 and "FINISHED" in result.output, result.output
        assert "is stuck" not in result.output
    while output(looping, 0).count("DOES NOT WAIT") < 4:
        assert pool.zygote().ended(looping.pids[0]) is None, output(looping, 0)
        time.sleep(0.05)
    text = end(pool, looping)[0].output
    assert "is stuck" not in text and "the run ends when" not in text


def test_rank_that_computes_alone_is_reported_and_not_ended(pool: Pool) -> None:
    """Rank 0 evaluates for five times the time after which there is a report."""
    results = run_ranks(pool, SCRIPT, 2, ["evaluate", "0"], env={"SMP_HANG_S": "1"})
    for result in results:
        assert result.returncode == 0 and "FINISHED" in result.output, result.output
        assert "is stuck" not in result.output
    text = results[0].output
    assert re.search(names(0) + ".*DOES NOT WAIT since .*, but its Python stack changes; ", text)
    assert "because the Python stack of global_rank 0 changes; SMP_TIMEOUT_S ends it" in text, text


# ---- ranks that leave --------------------------------------------------------------


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("action", ["exit", "leave"])
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (2, 2)], ids=["pp2-dp2", "tp2-pp2"])
def test_rank_that_exits_is_named_first_by_all_others(
    pool: Pool, pp: int, tp: int, action: str, victim: int
) -> None:
    results = run_ranks(pool, SCRIPT, 4, [action, str(victim), f"--pp={pp}", f"--tp={tp}"])
    assert "AT " in results[victim].output, results[victim].output
    for result in results:
        text = f"rank {result.rank} ({result.returncode}):\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        if result.rank != victim:
            first = re.search(r"(?<!\[)global_rank (\d+) \(pp", result.output)
            assert first and int(first[1]) == victim, text


# ---- signals while ranks wait ----------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_in_a_barrier_ends_the_ranks_that_wait_with_it(
    pool: Pool, number: signal.Signals
) -> None:
    started = start_ranks(pool, SCRIPT, 3, ["barrier", "1"])
    for rank in (0, 1):
        wait_for(started, "AT ", [rank])
    time.sleep(0.5)
    os.kill(started.pids[1], number)
    wait_for_ends(pool, started, [0, 1])
    results = end(pool, started)
    assert re.search(names(1), results[0].output), results[0].output


@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_in_init_ends_all_ranks_that_have_come(pool: Pool, victim: int) -> None:
    started = start_ranks(pool, SCRIPT, 3, ["init", str(victim)])
    wait_for(started, "AT ", [2])
    wait_for_pulses(started, [0, 1])
    os.kill(started.pids[victim], signal.SIGINT)
    wait_for_ends(pool, started, [0, 1])
    text = end(pool, started)[1 - victim].output
    assert f"rank {victim} was ended by KeyboardInterrupt while it waited" in text, text


@pytest.mark.parametrize(
    ("action", "transport"),
    [("gloo-kill", "gloo"), ("gloo-raise", "gloo"), ("gloo-kill", "tcp"), ("hub", "tcp")],
)
def test_rank_that_fails_while_ranks_connect_ends_the_others(
    pool: Pool, action: str, transport: str
) -> None:
    """Checks ranks that break while groups connect.

    With the transport "tcp" Gloo connects only the groups of torch. The hub is in rank 0.
    """
    victim = 0 if action == "hub" else 1
    results = run_ranks(
        pool, SCRIPT, 3, [action, str(victim)],
        env={"SMP_TRANSPORT": transport},
    )  # fmt: skip
    assert "AT " in results[victim].output, results[victim].output
    for result in results:
        text = f"rank {result.rank} ({result.returncode}):\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        if result.rank == victim:
            continue
        if action == "hub":
            assert "rank 0 failed: ZeroDivisionError: the network broke" in result.output, text
        else:
            assert result.returncode == 1 and "PeerFailure" in result.output, text
            assert re.search(names(victim), result.output.split("PeerFailure: ")[-1]), text


# ---- workers that run the script again ---------------------------------------------


@pytest.mark.sample(keep=0)
def test_spawned_worker_reads_and_is_no_rank(pool: Pool) -> None:
    for result in run_ranks(pool, SCRIPT, 2, ["spawn", "0"]):
        assert result.returncode == 0, result.output
        assert "SUM 6.0" in result.output and "FINISHED" in result.output, result.output


@pytest.mark.sample(keep=0)
def test_spawned_worker_that_runs_the_script_again_is_refused(pool: Pool) -> None:
    results = run_ranks(pool, SCRIPT, 2, ["spawn", "0"], env={"ALARM_WITHOUT_GUARD": "1"})
    for result in results:
        assert not result.hung and result.returncode != 0, result.output
    words = "put what the script does under `if __name__ == '__main__':`"
    assert any(words in result.output for result in results), results[0].output


# ---- what takes long by itself, and has been going on since the first test ---------------


def test_missing_folder_of_the_rendezvous_is_an_error(pool: Pool, slow_jobs: SlowJobs) -> None:
    for result in wait_for_ranks(pool, slow_jobs.without_folder):
        assert not result.hung and result.returncode != 0, result.output
        assert "/missing, which does not exist" in result.output, result.output


def test_killed_rank_is_missed_in_init(pool: Pool, slow_jobs: SlowJobs) -> None:
    started = slow_jobs.with_a_killed_rank
    wait_for_ends(pool, started, [0])
    text = end(pool, started)[0].output
    assert "rank 1 came and has said nothing for" in text, text
