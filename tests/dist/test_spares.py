"""Processes that wait take the places of lost ranks, and the job is as if none had died.

With `SMP_GRID=all` 100 ranks are killed at random times (`SMP_NUM_KILLS` sets another number).
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import going_on
from benchmarks import spares as benchmark
from tests.dist.pool import Pool
from tests.dist.processes import Ended, Started, launch, run_ranks, start_ranks, wait_for_ranks
from tests.dist.test_going_on import (
    ALL,
    DROPS,
    MANY_STEPS,
    PLACES,
    SCRIPT,
    STEPS,
    Layout,
    losses_of,
    result_of,
    wait_for_first_step,
    words,
)
from tests.patience import wait_until

pytestmark = pytest.mark.waits

NUM_KILLS = int(os.environ.get("SMP_NUM_KILLS", "100" if ALL else "4"))
PP2, ALONE = Layout(pp=2), Layout(pp=2, dp=1)
DEGREE = "sharded_data_parallel_degree"


def shard_size(layout: Layout) -> int:
    keys = dict(layout.keys)
    found = layout.dp if "shard_optimizer_state" in keys else keys.get(DEGREE, 1)
    assert isinstance(found, int)
    return found


def keeps_copies(layout: Layout) -> bool:
    return layout.dp == 1 or shard_size(layout) > 1


def start(pool: Pool, layout: Layout, spares: int, *argv: str) -> Started:
    num_ranks = layout.per_replica * layout.dp
    words = [*layout.argv(on_failure="spare", redundancy=int(keeps_copies(layout))), *argv]
    return start_ranks(pool, SCRIPT, num_ranks, words, launcher="smp run", spares=spares)


def end(pool: Pool, job: Started, num_ranks: int) -> list[Ended]:
    """Ends processes that still wait when all others have ended, as `smp run` does."""
    zygote = pool.zygote()
    logs = [job.folder / f"rank{number}.log" for number in range(len(job.pids))]

    def idle() -> list[int]:
        waits = range(num_ranks, len(job.pids))
        return [n for n in waits if not logs[n].exists() or "AT " not in logs[n].read_text()
                and "TAKEN " not in logs[n].read_text()]  # fmt: skip

    def is_over() -> bool:
        return all(zygote.ended(pid) for n, pid in enumerate(job.pids) if n not in idle())

    wait_until(is_over, lambda: "\n".join(log.read_text() for log in logs if log.exists()))
    for number in idle():
        if zygote.ended(job.pids[number]) is None:
            zygote.kill(job.pids[number])
    return wait_for_ranks(pool, job)


def run(pool: Pool, layout: Layout, spares: int, *deaths: str, argv: list[str]) -> list[Ended]:
    """Runs a job in which processes die, as given by `NUMBER:PLACE:STEP`."""
    job = start(pool, layout, spares, *argv, *(f"--die={death}" for death in deaths))
    num_ranks = layout.per_replica * layout.dp
    ended = end(pool, job, num_ranks)
    for death in deaths:
        number = death.split(":")[0]
        victims = ended[num_ranks:] if number == "spare" else [ended[int(number)]]
        assert any("AT " in victim.output for victim in victims), f"{death}: {words(ended)}"
    return ended


def place_of(ended: Ended) -> int:
    """Returns the global rank that a process has, or had at the beginning."""
    taken = re.search(r"TAKEN (\d+)", ended.output)
    return int(taken[1]) if taken else ended.rank


def check_as_never_killed(
    pool: Pool, folder: Path, layout: Layout, ended: list[Ended], steps: int = STEPS
) -> list[dict[str, Any]]:
    """Compares a job with a job without deaths, which resumes where the first one has shrunk.

    Returns:
        what a rank that lived has noted about each loss.
    """
    kept = [rank for rank in ended if "RESULT " in rank.output]
    assert kept, words(ended)
    results = [result_of(rank) for rank in kept]
    resizes: list[dict[str, Any]] = max((r["resized"] for r in results), key=len)
    assert resizes, words(ended)
    for result in results:  # newcomers know of later ones only
        own = result["resized"]
        for resize, known in zip(own, resizes[len(resizes) - len(own) :], strict=True):
            # With copies some ranks may be in front of a norm, and others in the next step.
            apart = abs(resize["step"] - known["step"])
            assert apart <= keeps_copies(layout), words(ended)
            assert {**resize, "step": known["step"]} == known, words(ended)
    per, replicas = layout.per_replica, list(range(layout.dp))
    parts = [(0, replicas)]
    for resize in resizes:
        if not resize["newcomers"]:
            broken = {place_of(ended[number]) // per for number in resize["lost"]}
            replicas = [replica for replica in replicas if replica not in broken]
            parts.append((resize["step"], replicas))
    assert len(kept) == per * len(replicas), words(ended)
    ends = [*(begin for begin, _ in parts[1:]), steps]
    for (begin, replicas), last in zip(parts, ends, strict=True):
        argv = [f"--steps={last}", f"--reads={','.join(map(str, replicas))}"]
        argv += [f"--resume={folder}/{begin}"] * (begin > 0)
        argv += [f"--save={folder}/{last}"] * (last < steps)
        alike = run_ranks(pool, SCRIPT, per * len(replicas), [*layout.argv(), *argv])
        assert not any(rank.returncode for rank in alike), words(alike)
        for number, replica in enumerate(replicas):
            for within in range(per):
                own, place = alike[number * per + within], replica * per + within
                seen = set()
                for process in ended:
                    if place_of(process) == place:
                        found = {s: x for s, x in losses_of(process).items() if begin <= s < last}
                        expected = {step: losses_of(own)[step] for step in found}
                        assert found == expected, words([process, own])
                        seen |= set(found)
                # A rank may die between the end of a step and its report.
                assert len(seen) >= last - begin - 1 and last - 1 in seen, words(ended)
    for result in results:
        expected = result_of(alike[result["rank"]])
        assert result["digest"] == expected["digest"] and result["rate"] == expected["rate"]
    return resizes


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("place", "victim"), [(place, (number * 3 + 3) % 4) for number, place in enumerate(PLACES)]
)
def test_a_spare_takes_the_place_and_the_job_is_as_if_none_had_died(
    pool: Pool, tmp_path: Path, place: str, victim: int
) -> None:
    ended = run(pool, PP2, 2, f"{victim}:{place}:2", argv=[f"--steps={STEPS}"])
    assert ended[victim].returncode == (1 if place == "raise" else -signal.SIGKILL)
    [resize] = check_as_never_killed(pool, tmp_path, PP2, ended)
    late = place in ("confirmed", "clip", "optimizer", "between")
    assert resize["step"] in ((2, 3) if place == "confirm" else (2 + late,))
    assert resize["sizes"] == [2, 2] and victim in resize["lost"]
    # The rank beside it fails in the norm that both compute; elsewhere it stays.
    is_before_norm = place in ("confirmed", "clip") or (place == "confirm" and resize["step"] == 3)
    assert len(resize["lost"]) == len(resize["newcomers"]) == 1 + is_before_norm


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("layout", "spares", "deaths"),
    [
        (Layout(), 1, ["1:backward:2"]),
        (Layout(), 1, ["0:sum:3"]),
        (Layout(), 2, ["0:forward:1", "1:optimizer:3"]),
        (Layout(), 2, ["1:forward:1", "spare:backward:3"]),
        (Layout(tp=2), 1, ["0:backward:2"]),
        (Layout(tp=2), 2, ["3:forward:1", "0:sum:4"]),
        (Layout(pp=2), 2, ["0:forward:1", "3:backward:4"]),
        (Layout(pp=2), 2, ["2:forward:2", "3:forward:2"]),
        (Layout(pp=2), 2, ["3:forward:2", "spare:entered:0"]),
        (Layout(pp=2), 2, ["0:sum:2", "spare:built:0"]),
        (Layout(pp=2), 2, ["3:backward:2", "spare:taken:0"]),
        (Layout(pp=2), 2, ["0:forward:2", "3:forward:2"]),
        (Layout(pp=2), 3, ["3:forward:2", "2:connect:2"]),
        (Layout(pp=2), 3, ["3:forward:2", "2:torch:2"]),
        (Layout(pp=2), 3, ["0:forward:2", "1:joined:2"]),
        (Layout(pp=2, dp=3), 1, ["0:summed:2"]),
        (Layout(pp=2, flags=("--norm",)), 1, ["0:backward:3"]),
        (Layout(pp=2, keys=DROPS, flags=("--dropout=0.3",)), 1, ["1:backward:2"]),
        (Layout(flags=("--dropout=0.3",)), 1, ["0:backward:2"]),
        (Layout(pp=2, keys=(("fp16", True),)), 1, ["0:backward:3"]),
        (Layout(pp=2, keys=(("bf16", True),)), 1, ["3:summed:3"]),
        (Layout(pp=2, flags=("--double",)), 1, ["1:sum:3"]),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_layouts_stay(
    pool: Pool, tmp_path: Path, layout: Layout, spares: int, deaths: list[str]
) -> None:
    ended = run(pool, layout, spares, *deaths, argv=[f"--steps={STEPS}"])
    resizes = check_as_never_killed(pool, tmp_path, layout, ended)
    assert all(resize["newcomers"] for resize in resizes)
    assert all(resize["sizes"] == [layout.tp * layout.dp] * 2 for resize in resizes)


def test_without_a_spare_that_is_left_the_whole_replicas_go_on(pool: Pool, tmp_path: Path) -> None:
    deaths = ["0:forward:1", "3:backward:3"]
    ended = run(pool, PP2, 1, *deaths, argv=[f"--steps={STEPS}"])
    first, second = check_as_never_killed(pool, tmp_path, PP2, ended)
    assert first["newcomers"] == [4] and first["sizes"] == [2, 2]
    assert second["newcomers"] == [] and second["sizes"] == [2, 1]
    assert second["lost"] == [2, 3]
    assert "too few processes wait for places of lost ranks" in words(ended)


def test_losses_are_those_of_a_plain_script(pool: Pool) -> None:
    ended = run(pool, Layout(flags=("--double",)), 1, "0:sum:2", argv=[f"--steps={STEPS}"])
    own = {place: {} for place in range(2)}
    for process in ended:
        own[place_of(process)] |= losses_of(process)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for step in range(STEPS):
            batches = [
                torch.randn(4, 8, generator=torch.Generator().manual_seed(step + 100 * replica))
                for replica in range(2)
            ]
            losses = [model(batch.view(2, 2, 8)).square().mean((1, 2)) for batch in batches]
            for replica, expected in enumerate(losses):
                found = [float.fromhex(text) for text in own[replica][step].split()]
                assert found == pytest.approx(expected.tolist(), rel=1e-13), step
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("layout", "misuse", "text"),
    [
        (Layout(), "plain", "an optimizer is not wrapped, and processes that take the places"),
        (Layout(), "late", "was called before smp.take_over"),
        (ALONE, "graph", "cannot be copied (a tensor has a graph)"),
        (Layout(tp=2, dp=1), "whole", "an optimizer exchanges whole tensors between ranks"),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_scripts_that_would_lose_state_are_refused(
    pool: Pool, layout: Layout, misuse: str, text: str
) -> None:
    job = start(pool, layout, 1, f"--misuse={misuse}")
    ended = end(pool, job, 2)
    for rank in ended[:2]:
        assert rank.returncode == 1 and text in rank.output, words(ended)


def test_a_call_that_others_do_not_make_is_refused_and_the_others_go_on(pool: Pool) -> None:
    argv = [f"--steps={STEPS}", "--misuse=gather"]
    ended = run(pool, Layout(), 1, "1:backward:2", argv=argv)
    assert "smp.allgather was called in a process that takes the place" in ended[2].output
    assert result_of(ended[0])["resized"][0]["newcomers"] == [], words(ended)


def smp_run(*argv: str, spares: int = 1, on_failure: str = "spare") -> Any:
    command = [sys.executable, "-m", "smp_cli", "run", "-n", "2", f"--spares={spares}"]
    return launch([*command, str(SCRIPT), *Layout().argv(on_failure=on_failure), *argv])


def test_smp_run_starts_spares_and_ends_those_that_still_wait() -> None:
    job = smp_run(f"--steps={STEPS}", "--die=1:backward:2", spares=2)
    assert job.returncode == 0, job.stdout
    assert "smp run: rank 1 was killed by SIGKILL; the ranks [" in job.stdout, job.stdout
    assert re.search(r"the ranks \[1\] are lost, \[[23]\] take their places", job.stdout)
    last = "without the ranks [1], which it has lost; ["
    assert last in job.stdout and job.stdout.count("RESULT ") == 2, job.stdout


def test_smp_run_names_a_spare_that_could_not_wait() -> None:
    job = smp_run("--steps=100", "--step-s=0.05", on_failure="end")  # the spare fails meanwhile
    assert job.returncode == 0 and job.stdout.count("RESULT ") == 2, job.stdout
    assert "rank 2 exited with status 1, which has waited for the place" in job.stdout, job.stdout
    assert "start the job without --spares" in job.stdout, job.stdout


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--spares=1", "--torch-env"], "--spares and --max-replacements go without --torch-env"),
        (["--spares=1", "--hosts=a,b"], "3 processes (-n and --spares) cannot be divided over 2"),
        (["--store"], "--store is for several hosts (--hosts)"),
    ],
)
def test_smp_run_refuses_options_that_do_not_fit(options: list[str], text: str) -> None:
    job = launch([sys.executable, "-m", "smp_cli", "run", "-n", "2", *options, str(SCRIPT)])
    assert job.returncode == 2, job.stdout
    assert text in job.stdout


RANDOM_LAYOUTS = (Layout(pp=2), Layout(), Layout(tp=2), ALONE, Layout(pp=3, dp=1))


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("index", range(NUM_KILLS))
def test_random_kills_change_nothing(pool: Pool, tmp_path: Path, index: int) -> None:
    dice = random.Random(2000 * int(os.environ["SMP_GRID_SEED"]) + index)
    layout = RANDOM_LAYOUTS[index % len(RANDOM_LAYOUTS)]
    num_ranks = layout.per_replica * layout.dp
    victim = dice.randrange(num_ranks)
    # The rank beside a dead one is lost as well if it is in a norm of both.
    job = start(pool, layout, layout.per_replica, f"--steps={MANY_STEPS}", "--step-s=0.03")
    wait_for_first_step(pool, job, victim)
    time.sleep(dice.uniform(0.0, 1.0))
    pool.zygote().kill(job.pids[victim])
    ended = end(pool, job, num_ranks)
    assert ended[victim].returncode == -signal.SIGKILL, "it was killed before its end"
    [resize] = check_as_never_killed(pool, tmp_path, layout, ended, MANY_STEPS)
    assert victim in resize["lost"] and len(resize["lost"]) == len(resize["newcomers"])


@pytest.mark.sample(keep=0)
def test_benchmark_measures_each_part_of_a_stall_and_the_waiting(pool: Pool) -> None:
    result = going_on.summarise_stall([benchmark.stall(pool, "backward", 3)], "spares")
    assert all(result[f"{name}_s"] > 0 for name in going_on.PARTS)
    assert result["median_s"] == result["worst_s"]
    assert 0 <= benchmark.waiting(pool, 2.0) < 0.5
