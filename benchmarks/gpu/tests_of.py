"""Files of tests, run by pytest in a process of its own, as figures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.figures import REPO, Figures, Limit


@dataclass(frozen=True)
class Counts:
    """Counts of a report in JUnit's form.

    Attributes:
        failed: names of the tests that failed, broken ones included.
    """

    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: float


def counts_of(report: str) -> Counts:
    """Reads a report.

    Args:
        report: XML that ``pytest --junitxml`` has written.
    """
    passed = skipped = 0
    failed = []
    root = ElementTree.fromstring(report)
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Counts(passed, skipped, tuple(failed), sum(float(s.get("time", 0)) for s in root))


def run_tests(figures: Figures, path: str, selected: Sequence[str] = ()) -> None:
    """Runs a file of tests; all cases of each claim, but in a dry run only those selected.

    Args:
        path: path of the file, from the root of the repository.
        selected: arguments of pytest for a dry run.
    """
    if not figures.has_time(path, 10.0):
        return
    with figures.measuring(path), tempfile.TemporaryDirectory(prefix="smp-gpu-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", path, f"--junitxml={report}"]
        command += ["-q", "-p", "no:cacheprovider", *(selected if figures.device.is_dry else ())]
        # Before the part itself is ended, so that other files get their line.
        limit_s = max(5.0, figures.left_s() - 5.0)
        try:
            done = subprocess.run(command, cwd=REPO, env=environment(os.environ), timeout=limit_s)
        except subprocess.TimeoutExpired:
            figures.fail(path, f"its tests did not end within {limit_s:.0f} s")
            return
        if not report.exists():
            figures.fail(path, f"pytest ended with status {done.returncode} and no report")
            return
        tell(figures, path, counts_of(report.read_text()))


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Variables of the tests: all cases, and nothing that this process says about itself."""
    paths = [str(REPO / "python"), str(REPO), own.get("PYTHONPATH", "")]
    env = {name: value for name, value in own.items() if name != "SMP_DEVICE"}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SMP_SAMPLES": "all"}


def tell(figures: Figures, path: str, counts: Counts) -> None:
    """Two figures of a file. One without a test that passed is a failure."""
    shown = ", ".join(counts.failed[:5]) + (" ..." if len(counts.failed) > 5 else "")
    figures.add(
        f"{path}: failed",
        len(counts.failed),
        "tests",
        bound=Limit(most=0),
        note=shown,
        failed=list(counts.failed),
        seconds=counts.seconds,
    )
    figures.add(
        f"{path}: passed", counts.passed, "tests", bound=Limit(least=1), skipped=counts.skipped
    )
