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
from dataclasses import replace
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
NO_NORM = "It had not computed a norm or checked gradients between"


def sharded(degree: int, *flags: str, pp: int = 1, dp: int = 0, **keys: object) -> Layout:
    """Returns a layout with sharded parameters; `degree` 0: with sharded optimizer state."""
    key = (DEGREE, degree) if degree else ("shard_optimizer_state", True)
    return Layout(pp=pp, dp=dp or degree, keys=(key, *keys.items()), flags=flags)


def shard_size(layout: Layout) -> int:
    keys = dict(layout.keys)
    found = layout.dp if "shard_optimizer_state" in keys else keys.get(DEGREE, 1)
    assert isinstance(found, int)
    return found


def start(pool: Pool, layout: Layout, spares: int, *argv: str) -> Started:
    num_ranks = layout.per_replica * layout.dp
    keeps = layout.dp == 1 or shard_size(layout) > 1
    words = [*layout.argv(on_failure="spare", redundancy=int(keeps)), *argv]
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
        assert own == resizes[len(resizes) - len(own) :], words(ended)
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


COPY = re.compile(r"state after a call of step .* from the copy of (\d+) bytes that rank (\d+) has")


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    ("layout", "spares", "deaths"),
    [
        (Layout(tp=2, dp=1), 1, ["0:between:2"]),
        (Layout(pp=3, dp=1), 2, ["0:backward:1", "1:forward:3"]),
        (ALONE, 1, ["1:optimizer:2"]),
        (ALONE, 1, ["0:forward:1"]),
        (ALONE, 1, ["1:exchange:2"]),
        (Layout(pp=2, dp=1, flags=("--unclipped",)), 1, ["1:confirm:2"]),
        (ALONE, 1, ["0:optimizer:3"]),
        (ALONE, 1, ["1:between:4"]),
        (ALONE, 1, ["1:raise:2"]),
        (ALONE, 2, ["1:forward:2", "spare:built:0"]),
        (ALONE, 2, ["0:sum:2", "spare:taken:0"]),
        (ALONE, 2, ["1:backward:2", "spare:between:2"]),
        (Layout(pp=3, dp=1), 1, ["2:between:2"]),
        (Layout(pp=2, tp=2, dp=1), 1, ["3:optimizer:2"]),
        (Layout(tp=2, dp=1), 1, ["1:backward:2"]),
        (Layout(pp=2, dp=1, flags=("--norm",)), 1, ["0:optimizer:3"]),
        (Layout(pp=2, dp=1, keys=DROPS, flags=("--dropout=0.3",)), 1, ["1:between:2"]),
        (Layout(pp=2, dp=1, keys=(("fp16", True),)), 1, ["0:optimizer:3"]),
        (Layout(pp=2, dp=1, keys=(("fp16", True),)), 1, ["1:backward:1"]),
        (Layout(pp=2, dp=1, keys=(("bf16", True),)), 1, ["1:between:3"]),
        (Layout(pp=2, dp=1, flags=("--double",)), 1, ["1:optimizer:3"]),
        (Layout(pp=2, dp=1, flags=("--early",)), 1, ["1:optimizer:3"]),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_a_copy_takes_the_place_of_a_replica(
    pool: Pool, tmp_path: Path, layout: Layout, spares: int, deaths: list[str]
) -> None:
    ended = run(pool, layout, spares, *deaths, argv=[f"--steps={STEPS}"])
    resizes = check_as_never_killed(pool, tmp_path, layout, ended)
    assert all(len(resize["lost"]) == len(resize["newcomers"]) == 1 for resize in resizes)
    check_copies_were_taken(layout, ended)


def check_copies_were_taken(layout: Layout, ended: list[Ended]) -> None:
    size = layout.per_replica * layout.dp
    newcomers = [process for process in ended if "TAKEN " in process.output]
    assert newcomers, words(ended)
    for process in newcomers:
        found = COPY.search(process.output)
        assert found and int(found[2]) == (place_of(process) + 1) % size, process.output


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize(
    ("layout", "spares", "deaths"),
    [
        (sharded(2), 1, ["0:forward:1"]),
        (sharded(2), 1, ["1:backward:2"]),
        (sharded(2), 1, ["0:sum:2"]),
        (sharded(2), 1, ["1:summed:2"]),
        (sharded(2), 1, ["0:exchange:2"]),
        (sharded(2), 1, ["1:optimizer:2"]),
        (sharded(2), 1, ["0:between:3"]),
        (sharded(2), 2, ["0:optimizer:2", "1:forward:4"]),
        (sharded(4), 1, ["3:forward:2"]),
        (sharded(4), 1, ["0:backward:2"]),
        (sharded(4), 1, ["2:sum:2"]),
        (sharded(4), 1, ["1:optimizer:2"]),
        (sharded(4), 1, ["3:between:2"]),
        (sharded(4), 2, ["0:optimizer:2", "2:optimizer:2"]),
        (sharded(4), 2, ["1:backward:2", "spare:built:0"]),
        (sharded(4, sdp_param_persistence_threshold=0), 1, ["1:backward:2"]),
        (sharded(2, pp=2), 1, ["0:forward:2"]),
        (sharded(2, pp=2), 1, ["3:backward:2"]),
        (sharded(2, pp=2), 1, ["1:sum:2"]),
        (sharded(2, pp=2), 1, ["2:optimizer:2"]),
        (sharded(2, pp=2), 2, ["0:between:1", "3:optimizer:3"]),
        (sharded(2, dp=4), 1, ["2:optimizer:2"]),
        (sharded(2, dp=4), 2, ["0:backward:1", "1:between:3"]),
        (replace(sharded(2), tp=2), 1, ["3:optimizer:2"]),
        (sharded(2, fp16=True), 1, ["1:backward:2"]),
        (sharded(2, fp16=True), 1, ["0:optimizer:2"]),
        (sharded(2, f"--scale={2**22}", fp16=True), 1, ["1:between:1"]),
        (sharded(2, bf16=True), 1, ["0:between:2"]),
        (sharded(2, "--unclipped", sdp_gradient_clipping=0.05), 1, ["0:optimizer:2"]),
        (sharded(2, "--unclipped", sdp_gradient_clipping=0.05), 1, ["1:forward:2"]),
        (sharded(2, "--dropout=0.3"), 1, ["1:between:2"]),
        (sharded(2, "--norm"), 1, ["0:optimizer:2"]),
        (sharded(0, dp=2), 1, ["0:forward:1"]),
        (sharded(0, dp=2), 1, ["1:backward:2"]),
        (sharded(0, dp=2), 1, ["0:sum:2"]),
        (sharded(0, dp=2), 1, ["1:optimizer:2"]),
        (sharded(0, "--unclipped", dp=2), 1, ["0:confirm:2"]),
        (sharded(0, dp=2), 1, ["0:between:3"]),
        (sharded(0, dp=2, overlapping_allreduce=False), 1, ["1:between:2"]),
        (sharded(0, dp=4), 2, ["1:optimizer:2", "3:optimizer:2"]),
        (sharded(0, pp=2, dp=2), 1, ["3:optimizer:2"]),
        (sharded(0, dp=2, bf16=True), 1, ["1:optimizer:2"]),
        (sharded(0, f"--scale={2**22}", dp=2, fp16=True), 1, ["1:between:1"]),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_a_copy_has_the_only_part_of_a_sharded_state(
    pool: Pool, tmp_path: Path, layout: Layout, spares: int, deaths: list[str]
) -> None:
    ended = run(pool, layout, spares, *deaths, argv=[f"--steps={STEPS}"])
    resizes = check_as_never_killed(pool, tmp_path, layout, ended)
    assert all(len(resize["lost"]) == len(resize["newcomers"]) for resize in resizes)
    victims = {int(number) for death in deaths if (number := death.split(":")[0]) != "spare"}
    taken = {place_of(process) for process in ended if "TAKEN " in process.output}
    assert taken == victims & set(range(layout.per_replica * layout.dp))
    check_copies_were_taken(layout, ended)
    check_is_sharded(layout, ended, 8)


def check_is_sharded(layout: Layout, ended: list[Ended], width: int) -> None:
    moments = [result_of(rank)["moments"] for rank in ended if "RESULT " in rank.output]
    num_in_stage = width * width + width * layout.tp  # biases are on all tensor-parallel ranks
    if "--norm" in layout.flags:
        num_in_stage += 2 * width
    assert sum(moments) == layout.pp * num_in_stage * layout.dp // shard_size(layout), moments
    assert all(count < num_in_stage / layout.tp for count in moments), moments


@pytest.mark.sample(keep=1)
def test_copies_have_the_bytes_of_parameters_moments_and_gradients(
    pool: Pool, tmp_path: Path
) -> None:
    width = 256
    layout = Layout(pp=2, dp=1, flags=(f"--width={width}",))
    ended = run(pool, layout, 1, "1:optimizer:2", argv=[f"--steps={STEPS}"])
    check_as_never_killed(pool, tmp_path, layout, ended)
    expected = 4 * 4 * (width * width + width)
    found = COPY.search(ended[2].output)
    assert found and expected < int(found[1]) < 1.01 * expected
    shown = re.findall(r"the ranks keep copies of (\d+) bytes, at most (\d+)", ended[0].output)
    num_all, num_most = map(int, shown[-1])
    assert 2 * expected < num_all < 2.02 * expected and expected < num_most < 1.01 * expected


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("layout", [ALONE, sharded(2)], ids=repr)
def test_copies_are_sent_where_ranks_share_no_memory(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    layout = replace(layout, flags=("--misuse=apart",))
    ended = run(pool, layout, 2, "1:optimizer:2", "0:backward:4", argv=[f"--steps={STEPS}"])
    check_as_never_killed(pool, tmp_path, layout, ended)
    check_copies_were_taken(layout, ended)
    assert "copies are sent, as ranks share no memory" in ended[0].output


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(
    ("layout", "per_parameter"),
    [
        (sharded(4, "--width=256"), 16 / 4),
        (sharded(2, "--width=256", pp=2), 16 / 2),
        (sharded(2, "--width=256", bf16=True), 18 / 2),
        (sharded(0, "--width=256", dp=2), 4 + 12 / 2),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_copies_of_sharded_state_have_the_bytes_of_a_part(
    pool: Pool, tmp_path: Path, layout: Layout, per_parameter: float
) -> None:
    ended = run(pool, layout, 1, "1:optimizer:2", argv=[f"--steps={STEPS}"])
    check_as_never_killed(pool, tmp_path, layout, ended)
    check_is_sharded(layout, ended, 256)
    expected = per_parameter * (256 * 256 + 256)
    found = COPY.search(ended[layout.per_replica * layout.dp].output)
    assert found and expected < int(found[1]) < 1.02 * expected


@pytest.mark.sample(keep=0)
def test_an_update_that_was_skipped_stays_skipped(pool: Pool, tmp_path: Path) -> None:
    layout = Layout(pp=2, dp=1, keys=(("fp16", True),), flags=(f"--scale={2**22}",))
    ended = run(pool, layout, 1, "1:between:1", argv=[f"--steps={STEPS}"])
    check_as_never_killed(pool, tmp_path, layout, ended)
    for process in ended:
        assert "SKIPPED 1\n" in process.output, process.output


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(
    ("layout", "deaths", "text"),
    [
        (ALONE, ["1:clip:2"], f"died: .* {NO_NORM}"),
        (sharded(2, "--unclipped"), ["1:clip:2"], f"died: .* {NO_NORM}"),
        (
            sharded(0, "--misuse=reads", dp=2),
            ["1:between:2"],
            r"reading parameters after an update .* in a process that takes the place of a lost",
        ),
        (Layout(pp=3, dp=1), ["1:forward:2", "2:connect:2"], "copies of their states were lost as"),
        (Layout(pp=3, dp=1), ["1:forward:2", "0:resize:2"], "keeper of its copy, has not finished"),
        (
            Layout(pp=2, dp=1, flags=("--misuse=same",)),
            ["1:forward:3"],
            "is that after the call before, so this process cannot know where to go on",
        ),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_jobs_end_with_the_reason_where_no_copy_helps(
    pool: Pool, layout: Layout, deaths: list[str], text: str
) -> None:
    ended = run(pool, layout, 2, *deaths, argv=[f"--steps={STEPS}"])
    assert not any("RESULT " in process.output for process in ended)
    living = [process for process in ended if process.returncode == 1]
    assert living and any(re.search(text, process.output) for process in living), words(ended)


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
    job = smp_run("--steps=2", on_failure="end")
    assert job.returncode == 0 and job.stdout.count("RESULT ") == 2, job.stdout
    assert "rank 2 exited with status 1, which has waited for the place" in job.stdout, job.stdout
    assert "start the job without --spares" in job.stdout, job.stdout


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("options", [["--hosts=a,b"], ["--torch-env"]], ids=str)
def test_smp_run_has_spares_on_one_machine_only(options: list[str]) -> None:
    command = [sys.executable, "-m", "smp_cli", "run", "-n", "2", "--spares=1", *options]
    job = launch([*command, str(SCRIPT)])
    assert job.returncode == 2 and "--spares is for one machine" in job.stdout, job.stdout


# Without norms a copy serves for each death.
RANDOM_LAYOUTS = (
    Layout(pp=2), Layout(), Layout(tp=2), Layout(pp=2, dp=1, flags=("--unclipped",))
)  # fmt: skip


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


SHARDED_LAYOUTS = (sharded(4, "--unclipped"), sharded(2, pp=2), sharded(0, "--unclipped", dp=2))


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("index", range(max(NUM_KILLS // 2, 3)))
def test_random_kills_of_sharded_jobs_change_nothing_or_end_by_name(
    pool: Pool, tmp_path: Path, index: int
) -> None:
    """Kills ranks also before the norm of an update, which nothing replaces."""
    dice = random.Random(3000 * int(os.environ["SMP_GRID_SEED"]) + index)
    layout = SHARDED_LAYOUTS[index % len(SHARDED_LAYOUTS)]
    num_ranks = layout.per_replica * layout.dp
    victim = dice.randrange(num_ranks)
    job = start(pool, layout, 1, f"--steps={MANY_STEPS}", "--step-s=0.03")
    wait_for_first_step(pool, job, victim)
    time.sleep(dice.uniform(0.0, 1.0))
    pool.zygote().kill(job.pids[victim])
    ended = end(pool, job, num_ranks)
    assert ended[victim].returncode == -signal.SIGKILL, "it was killed before its end"
    if any("RESULT " in rank.output for rank in ended):
        [resize] = check_as_never_killed(pool, tmp_path, layout, ended, MANY_STEPS)
        assert resize["lost"] == [victim] and resize["newcomers"] == [num_ranks]
        print("OUTCOME: went on")
    else:
        assert NO_NORM in words(ended)
        print("OUTCOME: ended by name")


@pytest.mark.sample(keep=0)
def test_benchmark_measures_each_part_of_a_stall_and_the_waiting(pool: Pool) -> None:
    result = going_on.summarise_stall([benchmark.stall(pool, "backward", 3)], "spares")
    assert all(result[f"{name}_s"] > 0 for name in going_on.PARTS)
    assert result["median_s"] == result["worst_s"]
    assert 0 <= benchmark.waiting(pool, 2.0) < 0.5
