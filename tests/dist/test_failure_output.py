"""The terminal's output of a job that ends well, or fails: it is short, with the cause last."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.dist.processes import REPO, launch, torchrun

pytestmark = pytest.mark.waits

SCRIPT = str(REPO / "tests" / "dist" / "scripts" / "fails.py")
NUM_RANKS = 4
MAX_LINES = 25
SMP_RUN = [sys.executable, "-m", "smp_cli", "run", "-n", str(NUM_RANKS)]


def without_start(output: str) -> list[str]:
    """Lines behind those of a run that goes well."""
    lines = output.splitlines()
    return [line for line in lines if line and not re.match(r"(\[0\] )?smp: ", line)]


def stacks_in(lines: list[str]) -> str:
    """The file that the report names; it is removed."""
    found = re.search(r"stacks of all ranks: (\S+)", "\n".join(lines))
    assert found, lines
    text = Path(found[1]).read_text()
    Path(found[1]).unlink()
    return text


def check_box(lines: list[str], *words: str) -> None:
    box = [line[2:] for line in lines if line.startswith("| ")]
    assert [line.split()[0] for line in box] == ["who", "where", "do"], "\n".join(lines)
    for line, word in zip(box, words, strict=True):
        assert word in line, line


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("rank", [1, 2])
def test_error_of_a_job_of_smp_run_ends_with_its_box(rank: int) -> None:
    done = launch([*SMP_RUN, SCRIPT, "raise", str(rank)])
    lines = without_start(done.stdout)
    assert done.returncode == 1 and len(lines) <= MAX_LINES, done.stdout
    place = f"pipeline stage {rank % 2}, replica {rank // 2}"
    where = f"(module '{2 * (rank % 2)}', microbatch" if rank % 2 else "fails.py"
    check_box(lines, f"global_rank {rank} ({place}): ValueError: no such label", where, "correct")
    assert lines[-2].startswith("| do "), "nothing comes behind it"
    assert lines[0] == f"smp run: rank {rank} exited with status 1"
    text = stacks_in(lines)
    for other in range(NUM_RANKS):
        assert f"==== [global_rank {other} |" in text, "stacks of all ranks"
    assert text.count("PeerFailure: ") == NUM_RANKS - 1 and "line 99" in text


def test_killed_rank_is_named_by_the_box_of_another_one() -> None:
    done = launch([*SMP_RUN, SCRIPT, "kill", "1"])
    lines = without_start(done.stdout)
    assert done.returncode == 128 + signal.SIGKILL and len(lines) <= MAX_LINES, done.stdout
    check_box(lines, "global_rank 1 (pipeline stage 1, replica 0) died", "fails.py", "dmesg")
    stacks_in(lines)


@pytest.mark.sample(keep=0)
def test_deadlock_has_its_table_once() -> None:
    done = launch([*SMP_RUN, SCRIPT, "deadlock", "3"])
    lines = without_start(done.stdout)
    assert done.returncode == 1 and len(lines) <= MAX_LINES, done.stdout
    check_box(lines, "deadlock", "fails.py", "same collective calls")
    assert done.stdout.count("every rank waits") <= 2, "in the message, and in the box"
    stacks_in(lines)


@pytest.mark.sample(keep=0)
def test_stacks_of_a_hang_go_to_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_HANG_S", "2")
    done = launch([*SMP_RUN, SCRIPT, "hang", "1"])
    lines = without_start(done.stdout)
    assert done.returncode and len(lines) <= MAX_LINES, done.stdout
    check_box(
        lines, "global_rank 1 (pipeline stage 1, replica 0) is stuck", "fails.py", "its stack"
    )
    assert re.search(r"Python stacks of all ranks: \S+/errors-\w+.txt", done.stdout)
    text = stacks_in(lines)
    assert all(f"---- global_rank {rank}\n" in text for rank in range(NUM_RANKS))


@pytest.mark.sample(keep=0)
def test_configuration_that_is_wrong_on_all_ranks_is_told_once() -> None:
    done = launch([*SMP_RUN, SCRIPT, "config", "0"])
    lines = without_start(done.stdout)
    assert done.returncode == 1 and len(lines) <= MAX_LINES, done.stdout
    check_box(lines, "microbatch", "fails.py", "did you mean 'microbatches'")
    stacks_in(lines)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(
    ("how", "words"), [("raise", "ValueError: no such label"), ("kill", "died")]
)
def test_under_torchrun_one_rank_prints(how: str, words: str) -> None:
    done = launch([*torchrun(NUM_RANKS), SCRIPT, how, "1"])
    assert done.returncode == 1
    own, _, summary = done.stdout.partition("ChildFailedError")
    lines = [
        line
        for line in without_start(own)
        if "elastic" not in line and not line.startswith(("Traceback (most", "  File", "    "))
    ]
    assert len(lines) <= MAX_LINES, done.stdout
    first_box = own[own.index("+---") :].splitlines()[:5]
    check_box(first_box, words, "fails.py", "")
    assert own.count("| who ") == 1, done.stdout
    if how == "raise":
        assert words in summary.rpartition("Root Cause")[2], "torchrun names it as well"
    stacks_in(first_box)


@pytest.mark.sample(keep=0)
def test_run_that_goes_well_prints_five_lines() -> None:
    for command, mark in ((SMP_RUN, "[0] smp: "), (torchrun(NUM_RANKS), "smp: ")):
        done = launch([*command, SCRIPT, "none", "0"])
        assert done.returncode == 0, done.stdout
        lines = [x for x in done.stdout.splitlines() if x.strip("* ") and "OMP_NUM" not in x]
        assert 3 <= len(lines) <= 5 and all(line.startswith(mark) for line in lines), done.stdout
        text = "\n".join(lines)
        assert "2 pipeline stages, 2 replicas" in text and "MiB" in text
        assert not re.search(r"\brdp\b|\bDPT\b|[()]|\bbytes\b|inconclusive", text), text


@pytest.mark.sample(keep=0)
def test_check_without_a_verdict_is_told_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMP_CHECK_FIRST_STEP", raising=False)
    command = [*SMP_RUN, SCRIPT, "dropout", "0"]
    assert "inconclusive" not in launch(command).stdout
    monkeypatch.setenv("SMP_CHECK_FIRST_STEP", "1")
    done = launch(command)
    assert "inconclusive: it draws random numbers" in done.stdout, done.stdout
