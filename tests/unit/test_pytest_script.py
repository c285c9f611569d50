"""`scripts/pytest.sh` runs what it is asked for, and everything if nobody asks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that says how pytest would be called."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\n[ "$1" = -m ] || exit 1\nshift\necho "called: $*"\n')
    path.chmod(0o755)
    return path


def calls(python: Path, *arguments: str) -> list[str]:
    command = [str(REPO / "scripts" / "pytest.sh"), str(python), *arguments]
    # `make test` calls the script for one half, in this environment.
    halves = {name: value for name, value in os.environ.items() if name != "SMP_TEST_MARKS"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=halves
    )
    return [line for line in done.stdout.splitlines() if line.startswith("called: ")]


def test_a_folder_among_the_arguments_takes_the_place_of_all_tests(python: Path) -> None:
    assert calls(python, "tests/gpu", "-x") == [
        "called: pytest -m not alone tests/gpu -x",
        "called: pytest -m alone tests/gpu -x",
    ]


def test_without_one_pytest_runs_all_of_its_folder(python: Path) -> None:
    assert calls(python, "-k", "softmax") == [
        "called: pytest -m not alone -k softmax",
        "called: pytest -m alone -k softmax",
    ]
    assert 'testpaths = ["tests"]' in (REPO / "pyproject.toml").read_text()
