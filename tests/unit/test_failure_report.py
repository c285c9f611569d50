"""Terminal output of a run that fails: a short traceback, and who, where and what to do."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import smp._C as _C
from smp.world import failure
from smp.world.failure import Culprit, FailureFile

MAX_LINES = 25
OWN = Culprit(1, "global_rank 1 (pipeline stage 1)", where="module '2', microbatch 3, forward")


def raised(error: BaseException, depth: int = 0) -> BaseException:
    """The exception with a traceback of so many frames of this file."""

    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        raise error

    try:
        deep(depth)
    except BaseException as caught:
        return caught
    raise AssertionError


def box_of(lines: list[str]) -> list[str]:
    assert lines[-1] == lines[-5] and set(lines[-1]) == set("+-")
    return lines[-4:-1]


def test_report_ends_with_who_where_and_what_to_do() -> None:
    error = raised(ValueError("no such label"))
    lines = failure.report(error, OWN, "/tmp/stacks")
    who, where, do = box_of(lines)
    assert who == "| who    global_rank 1 (pipeline stage 1): ValueError: no such label"
    assert error.__traceback__ and __file__ in where
    assert where.endswith("(module '2', microbatch 3, forward)")
    assert do.startswith("| do     correct the error of the traceback")
    assert do.endswith("; stacks of all ranks: /tmp/stacks")
    assert lines[0].startswith("Traceback of global_rank 1") and "    raise error" in lines


@pytest.mark.parametrize("num_lines", [1, 8, 9, 200])
@pytest.mark.parametrize("is_other", [False, True])
def test_report_is_short_however_long_message_and_stack_are(num_lines: int, is_other: bool) -> None:
    words = [f"line {i} " + "x" * 1000 for i in range(num_lines)]
    culprit = Culprit(3, "global_rank 3", is_other=is_other)
    lines = failure.report(raised(RuntimeError("\n".join(words)), 100), culprit, "file")
    assert len(lines) < MAX_LINES and all(len(line) <= 400 for line in lines)
    shown = "\n".join(lines[:-5])
    assert "line 0" in shown and f"line {num_lines - 1} " in shown
    if num_lines == 200:
        assert "... 192 lines more in file" in lines


def test_frames_of_the_library_and_of_torch_are_left_out() -> None:
    try:
        torch.nn.Linear(2, 2)(torch.zeros(1, 3))
    except RuntimeError as error:
        lines = failure.report(error, OWN, "")
    frames = [line for line in lines if line.startswith("  File")]
    assert len(frames) == 1 and __file__ in frames[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("died", "`dmesg`"),
        ("unreachable", "network"),
        ("left", "model.join()"),
        ("deadlock", "same collective calls"),
        ("stuck", "SMP_HANG_S"),
    ],
)
def test_advice_is_that_of_the_way_in_which_a_rank_failed(kind: str, words: str) -> None:
    error = raised(_C.PeerFailure("global_rank 1 (pp 1) died\n\nAt:\n  x.py(1): f\n"))
    who, where, do = box_of(
        failure.report(
            error,
            Culprit(1, "the culprit", kind, is_other=True, described="global_rank 1 (pp 1)"),
            "",
        )
    )
    assert who == "| who    the culprit died" and "noticed at" in where and words in do


def test_advice_of_a_message_of_smp_is_its_last_clause() -> None:
    try:
        _C.set_rank_prefix("[global_rank 1 | pp 1] ")
        with pytest.raises(ValueError) as caught:
            failure_of_smp()
        who, _, do = box_of(failure.report(caught.value, OWN, ""))
    finally:
        _C.set_rank_prefix("")
    assert "[global_rank" not in who
    assert do == "| do     choose a number of microbatches that divides it"


def failure_of_smp() -> None:
    code = compile(
        "raise ValueError('[global_rank 1 | pp 1] expected 4, got 6; choose a number of "
        "microbatches that divides it')",
        str(Path(failure.__file__)),
        "exec",
    )
    exec(code)


# ---- the file, and who prints


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailureFile:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (failure.FAILURE_VARIABLE, "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    made = FailureFile("a job")
    made.open()
    _C.set_details_file("")
    return made


def test_folder_is_for_this_user_alone_and_old_files_go(file: FailureFile) -> None:
    folder = file.path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    old, young = folder / "errors-old.txt", folder / "errors-young.txt"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, time.time() - 8 * 24 * 3600))
    FailureFile("another").open()
    _C.set_details_file("")
    assert young.exists() and not old.exists()


def test_file_that_another_process_removes_first_is_passed_over(
    file: FailureFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a host start together, and each of them removes old files."""
    gone = file.path.parent / "errors-gone.txt"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([gone]))
    another = FailureFile("another")
    another.open()
    _C.set_details_file("")
    assert another.append("text") and another.path.parent == file.path.parent


def test_folder_that_others_may_enter_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"smp-{os.getuid()}").mkdir(mode=0o755)
    file = FailureFile("a job")
    file.open()
    failure.show(raised(ValueError("x")), OWN, file)
    text = capfd.readouterr().err
    assert "| who " in text and "stacks of all ranks" not in text
    assert not list((tmp_path / f"smp-{os.getuid()}").iterdir())


def test_one_rank_prints_and_all_are_in_the_file(
    file: FailureFile, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [FailureFile("a job") for _ in range(3)]
    failure.show(raised(ValueError("mine")), OWN, file)
    pauses: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", pauses.append)
        for other in others:
            error = raised(_C.PeerFailure("global_rank 1 raised"))
            failure.show(error, Culprit(1, "global_rank 1", is_other=True), other)
    assert not pauses, "nobody waits for what is printed"
    text = capfd.readouterr().err
    assert text.count("| who ") == 1 and "ValueError: mine" in text
    stacks = file.path.read_text()
    assert stacks.count("Traceback (most recent call last)") == 4
    # A later run that meets at the same place prints again.
    time.sleep(0.01)
    failure.show(raised(ValueError("again")), OWN, FailureFile("a job"))
    assert "again" in capfd.readouterr().err


def test_other_rank_prints_where_the_culprit_does_not(
    file: FailureFile, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_WAIT_S", 0.1)
    error = raised(_C.PeerFailure("global_rank 1 raised in module 'a': boom"))
    failure.show(error, Culprit(1, "global_rank 1", is_other=True), file)
    assert "| who    global_rank 1 raised in module 'a': boom" in capfd.readouterr().err


def test_launcher_gets_the_report_and_the_terminal_nothing(
    file: FailureFile,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(failure.FAILURE_VARIABLE, str(tmp_path / "failure.json"))
    error = raised(ValueError("mine"))
    failure.show(error, OWN, file)
    told = json.loads((tmp_path / "failure.json").read_text())
    assert (told["culprit"], told["error"]) == (1, "ValueError")
    assert told["report"] == failure.report(error, OWN, str(file.path))
    assert capfd.readouterr().err == ""


def test_torchrun_gets_the_box_and_takes_the_culprit_for_the_root_cause(
    file: FailureFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {}
    for rank, culprit in ((1, OWN), (0, Culprit(1, "global_rank 1", is_other=True))):
        path = tmp_path / f"error{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        failure.show(raised(ValueError(f"of {rank}")), culprit, file)
        failures[rank] = ProcessFailure(rank, 100 + rank, 1, str(path))
    summary = ChildFailedError("train.py", dict(sorted(failures.items())))
    assert summary.get_first_failure()[0] == 1
    root = str(summary).rpartition("Root Cause")[2]
    assert "| who    global_rank 1 (pipeline stage 1): ValueError: of 1" in root


def test_hooks_that_only_print_are_those_of_python_and_torch() -> None:
    assert failure.is_plain(sys.__excepthook__)
    assert not failure.is_plain(test_hooks_that_only_print_are_those_of_python_and_torch)
