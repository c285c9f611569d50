"""Hosts are lost, and ``smp run --fewer-ranks`` goes on with the ranks that the others have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import Ended, run_ranks
from tests.dist.test_going_on import SCRIPT, Layout, words
from tests.dist.test_spares import place_of
from tests.hosts.network import Network, why_not
from tests.hosts.test_going_on import of_command
from tests.hosts.test_smp_run import running

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

STEPS = 40
KEEPING = {"on_failure": "spare", "redundancy": 1}


def sharded(degree: int) -> Layout:
    keys = {"ddp": True, "sharded_data_parallel_degree": degree, "ddp_dist_backend": "flat"}
    return Layout(dp=degree, keys=tuple(keys.items()))


def pipeline(degree: int) -> Layout:
    return Layout(pp=degree, dp=1, flags=("--layers=6",))


def run(
    folder: Path,
    layouts: tuple[Layout, Layout],
    hosts: list[str],
    lost: int,
    more_options: list[str],
    more_flags: list[str],
    **keys: object,
) -> tuple[list[Ended], str]:
    """Runs a job that loses a host; returns its processes, and what the command has said."""
    before, after = layouts
    num_before, num_after = (layout.per_replica * layout.dp for layout in layouts)
    flags = [*before.argv(**keys), f"--steps={STEPS}", "--step-s=0.03", *more_flags]
    flags += [f"--leave={folder}/checkpoints"]
    degrees = json.loads(after.argv(**keys)[0].removeprefix("--config="))
    config = ",".join(f"{key}={json.dumps(value)}" for key, value in degrees.items())
    options = ["-n", str(num_before), "--max-restarts", "1", "--log-dir", str(folder / "logs")]
    options += ["--fewer-ranks", f"{num_after}:{config}", *more_options]
    with Network(1 + len(hosts)) as network, running(
        network, folder, *options, str(SCRIPT), *flags, hosts=",".join(hosts),
        SMP_SHM="0",  # so that shards are added in one order, wherever the ranks are
    ) as command:  # fmt: skip
        for rank in range(num_before):
            command.wait_for(rf"\[{rank}\] STEP 3 ")
        network.kill(1 + lost)
        ended = of_command(command, folder)
        said = command.said
    left = [host for index, host in enumerate(hosts) if index != lost]
    assert f"{num_after} ranks are started on the hosts {', '.join(left)}" in said, said
    return ended, said


def check(
    pool: Pool, layouts: tuple[Layout, Layout], ended: list[Ended], resumed: int, folder: Path
) -> None:
    """Compares losses, bit by bit, with a job left alone, and from a step on with a resumed one."""
    before, after = layouts
    numbers = [layout.per_replica * layout.dp for layout in layouts]
    env = {"SMP_SHM": "0"}
    alone = run_ranks(pool, SCRIPT, numbers[0], [*before.argv(), f"--steps={STEPS}"], env=env)
    argv = [*after.argv(), f"--steps={STEPS}", f"--resume={folder}"]
    fewer = run_ranks(pool, SCRIPT, numbers[1], argv, env=env)
    assert not any(rank.returncode for rank in [*alone, *fewer]), words([*alone, *fewer])
    seen = [set[int]() for _ in range(numbers[0])]
    for process in ended:
        parts = process.output.split(f"RESUMED {resumed}\n")
        expected = [alone[place_of(process)], *fewer[process.rank : process.rank + 1]]
        for part, rank in zip(parts, expected, strict=False):
            found = set(re.findall(r"STEP \d+ .*", part))
            assert found <= set(re.findall(r"STEP \d+ .*", rank.output)), words([process, rank])
            steps = {int(line.split()[1]) for line in found}
            seen[place_of(process) if rank in alone else process.rank] |= steps
    for place in range(numbers[0]):
        last = STEPS if place < numbers[1] else resumed
        assert seen[place] >= set(range(last)), words(ended)
    for rank in range(numbers[1]):
        assert "RESULT " in ended[rank].output, words(ended)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(
    ("layouts", "hosts", "lost"),
    [
        ((pipeline(3), pipeline(2)), ["host1", "host2", "host3"], 1),
        ((pipeline(3), pipeline(2)), ["host1", "host2", "host3"], 0),
        ((sharded(4), sharded(2)), ["host1", "host2"], 1),
    ],
    ids=["pipeline", "first_host", "sharded"],
)
def test_no_step_is_lost_with_a_host(
    pool: Pool, tmp_path: Path, layouts: tuple[Layout, Layout], hosts: list[str], lost: int
) -> None:
    """Other hosts have the places of the lost ranks until all have saved."""
    ended, said = run(tmp_path, layouts, hosts, lost, ["--max-replacements=2"], [], **KEEPING)
    assert "hosts are lost: the ranks are asked to save, and fewer will go on" in said
    [left] = {int(step) for step in re.findall(r"LEFT (\d+)", said)}
    for process in ended:
        steps = re.findall(r"STEP (\d+) ", process.output)
        assert len(steps) == len(set(steps)), f"a step ran twice:\n{process.output}"
    check(pool, layouts, ended, left, tmp_path / "checkpoints")


@pytest.mark.sample(keep=0)
def test_a_job_that_ends_with_a_host_goes_on_from_its_last_checkpoint(
    pool: Pool, tmp_path: Path
) -> None:
    layouts, checkpoints = (pipeline(2), pipeline(1)), tmp_path / "checkpoints"
    hosts, saves = ["host1", "host2"], [f"--save-each={checkpoints}"]
    ended, said = run(tmp_path, layouts, hosts, 1, [], saves)
    resumed = re.search(r"RESUMED (\d+)", said)
    assert resumed, said
    # A job that resumes there is to begin with the same one.
    (checkpoints / "newest").write_text(f"after{int(resumed[1]) - 1}")
    check(pool, layouts, ended, int(resumed[1]), checkpoints)
