"""`scripts/pytest.sh` runs the tests that its arguments name, and all tests without any."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]
WAITS, COMPUTES, ALONE = "waits", "not alone and not waits", "alone"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that says how pytest would be called, and ends with the status of FAILS."""
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/sh\n[ "$1" = -m ] || exit 1\nshift\necho "called: $*"\n'
        'case "$3" in "${FAILS:-none}") exit 3 ;; "${SIGNALS:-none}") kill -INT $$ ;; esac\n'
    )
    path.chmod(0o755)
    return path


def run(python: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(REPO / "scripts" / "pytest.sh"), str(python), *arguments]
    # `make test` calls the script for one part, in this environment.
    outside = {name: value for name, value in os.environ.items() if name != "SMP_TEST_MARKS"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=outside | env,
        preexec_fn=hear_ctrl_c,  # whatever this session does
    )


def hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def calls(python: Path, *arguments: str) -> set[str]:
    """Returns the calls of pytest; two of the parts run at the same time."""
    done = run(python, *arguments)
    assert done.returncode == 0, done.stderr
    return {line for line in done.stdout.splitlines() if line.startswith("called: ")}


def test_a_folder_among_the_arguments_takes_the_place_of_all_tests(python: Path) -> None:
    assert calls(python, "tests/gpu", "-x") == {
        f"called: pytest -m {marks} tests/gpu -x" for marks in (WAITS, COMPUTES, ALONE)
    }


def test_without_one_pytest_runs_all_of_its_folder(python: Path) -> None:
    assert calls(python, "-k", "softmax") == {
        f"called: pytest -m {marks} -k softmax" for marks in (WAITS, COMPUTES, ALONE)
    }
    assert 'testpaths = ["tests"]' in (REPO / "pyproject.toml").read_text()


@pytest.mark.parametrize("part", [WAITS, COMPUTES, ALONE])
def test_a_failure_of_any_part_is_one_of_the_whole(python: Path, part: str) -> None:
    done = run(python, FAILS=part)
    assert done.returncode == 3 and done.stdout.count("called: ") == 3, done.stdout


def test_one_half_can_be_left_out(python: Path) -> None:
    assert "-m alone" not in run(python, SMP_TEST_MARKS="not alone").stdout
    alone = run(python, SMP_TEST_MARKS="alone").stdout
    assert "-m waits" not in alone and alone.count("called: ") == 1


def test_tests_that_wait_hear_ctrl_c(python: Path) -> None:
    """A shell lets its jobs in the background ignore it, and their children would, too."""
    done = run(python, SIGNALS=WAITS)
    assert done.returncode == 128 + signal.SIGINT, done.stdout
