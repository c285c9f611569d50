"""Runs the checks of the late device, each file in a process of its own.

A process that has the late device has it as torch's accelerator, which other tests must not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.installed import python_path

CHECKS = sorted(path.name for path in (Path(__file__).parent / "checks").glob("check_*.py"))
needs_device = pytest.mark.skipif(
    not (REPO / "python" / "smp_late_device.so").exists(),
    reason="smp_late_device is built with torch 2.11",
)


def test_there_are_checks() -> None:
    assert {"check_memory.py", "check_operators.py", "check_streams.py"} <= set(CHECKS)


@needs_device
@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("name", CHECKS)
def test_late_device(name: str) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"tests/device/checks/{name}",
        ],
        cwd=REPO,
        # A check fills the memory of a device.
        env={
            **os.environ,
            "PYTHONPATH": python_path(REPO),
            "SMP_SAMPLES": "all",
            "SMP_LATE_MEMORY_MB": "64",
        },
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
