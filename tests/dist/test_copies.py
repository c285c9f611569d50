"""Processes take places with copies of states, and the job is as if no rank had died.

With `SMP_GRID=all` 50 ranks of sharded jobs are killed at random times (`SMP_NUM_KILLS` sets twice
another number).
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import Ended
from tests.dist.test_going_on import (
    DROPS,
    MANY_STEPS,
    STEPS,
    Layout,
    result_of,
    wait_for_first_step,
    words,
)
from tests.dist.test_spares import (
    ALONE,
    DEGREE,
    NUM_KILLS,
    check_as_never_killed,
    end,
    place_of,
    run,
    shard_size,
    start,
)

pytestmark = pytest.mark.waits

ALONE_CALLS = replace(ALONE, flags=("--calls",))


def sharded(degree: int, *flags: str, pp: int = 1, dp: int = 0, **keys: object) -> Layout:
    """Returns a layout with sharded parameters; `degree` 0: with sharded optimizer state."""
    key = (DEGREE, degree) if degree else ("shard_optimizer_state", True)
    return Layout(pp=pp, dp=dp or degree, keys=(key, *keys.items()), flags=flags)


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
        (ALONE, 1, ["1:clip:2"]),
        (ALONE, 2, ["0:clip:1", "1:clip:3"]),
        (ALONE, 2, ["1:clip:2", "spare:clip:2"]),
        (ALONE, 2, ["1:clip:2", "spare:taken:0"]),
        (Layout(pp=3, dp=1), 1, ["0:clip:2"]),
        (Layout(pp=3, dp=1), 2, ["1:clip:1", "2:clip:3"]),
        (Layout(pp=2, tp=2, dp=1), 2, ["0:clip:2", "2:confirmed:2"]),
        (Layout(tp=2, dp=1), 1, ["0:clip:2"]),
        (Layout(pp=2, tp=2, dp=1), 1, ["2:clip:2"]),
        (Layout(pp=2, dp=1, keys=(("fp16", True),)), 1, ["0:clip:2"]),
        (Layout(pp=2, dp=1, flags=("--norm",)), 1, ["1:clip:3"]),
        (Layout(pp=2, dp=1, flags=("--barrier",)), 1, ["1:clip:2"]),
        (Layout(pp=2, dp=1, flags=("--barrier", "--calls")), 1, ["0:clip:2"]),
        (Layout(tp=2, dp=1, flags=("--calls",)), 1, ["1:clip:2"]),
    ],
    ids=lambda value: repr(value).replace("Layout", ""),
)
def test_a_copy_takes_the_place_of_a_replica(
    pool: Pool, tmp_path: Path, layout: Layout, spares: int, deaths: list[str]
) -> None:
    ended = run(pool, layout, spares, *deaths, argv=[f"--steps={STEPS}"])
    resizes = check_as_never_killed(pool, tmp_path, layout, ended)
    assert all(len(resize["lost"]) == len(resize["newcomers"]) for resize in resizes)
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
        (sharded(0, pp=2, dp=2), 1, ["1:between:2"]),
        (sharded(0, pp=2, dp=2), 1, ["0:clip:2"]),
        (sharded(0, dp=2, bf16=True), 1, ["1:optimizer:2"]),
        (sharded(0, f"--scale={2**22}", dp=2, fp16=True), 1, ["1:between:1"]),
        (sharded(2), 1, ["0:clip:2"]),
        (sharded(2, "--unclipped"), 1, ["1:clip:2"]),
        (sharded(4), 1, ["3:clip:2"]),
        (sharded(4), 2, ["0:clip:1", "2:clip:3"]),
        (sharded(4, "--unclipped"), 1, ["2:clip:2"]),
        (sharded(2, pp=2), 1, ["0:clip:2"]),
        (sharded(2, "--unclipped", pp=2), 1, ["3:clip:2"]),
        (sharded(2, pp=2), 2, ["1:clip:1", "2:clip:2"]),
        (sharded(2, dp=4), 1, ["1:clip:2"]),
        (replace(sharded(2), tp=2), 1, ["2:clip:2"]),
        (sharded(2, fp16=True), 1, ["1:clip:2"]),
        (sharded(2, "--unclipped", sdp_gradient_clipping=0.05), 1, ["0:clip:2"]),
        (sharded(0, dp=2), 1, ["1:clip:2"]),
        (sharded(0, pp=2, dp=2), 1, ["0:clip:2"]),
        (sharded(0, dp=4), 2, ["1:clip:2", "3:clip:3"]),
        (sharded(0, f"--scale={2**22}", dp=2, fp16=True), 1, ["0:clip:1"]),
        (sharded(2, "--calls"), 1, ["0:clip:2"]),
        (sharded(0, "--calls", dp=2), 1, ["1:clip:2"]),
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
        (
            sharded(0, "--misuse=reads", dp=2),
            ["1:between:2"],
            r"reading parameters after an update .* in a process that takes the place of a lost",
        ),
        (ALONE_CALLS, ["1:optimizer:2"], "smp.allgather was called in a process that takes"),
        (
            sharded(2, "--calls"),
            ["1:optimizer:2"],
            "a forward outside of a step function was called in a process that takes the place",
        ),
        (Layout(pp=3, dp=1), ["1:clip:2", "2:clip:2"], "copies of their states were lost as"),
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


SHARDED_LAYOUTS = (sharded(4), sharded(2, pp=2), sharded(0, dp=2, fp16=True), sharded(2, dp=4))


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("index", range(max(NUM_KILLS // 2, 4)))
def test_random_kills_of_sharded_jobs_change_nothing(
    pool: Pool, tmp_path: Path, index: int
) -> None:
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
    [resize] = check_as_never_killed(pool, tmp_path, layout, ended, MANY_STEPS)
    assert resize["lost"] == [victim] and resize["newcomers"] == [num_ranks]
