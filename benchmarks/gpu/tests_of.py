"""Files of tests, run by pytest in processes of their own, as figures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import outcomes, processes
from benchmarks.gpu.figures import REPO, Figures, Limit
from benchmarks.gpu.outcomes import Outcomes
from benchmarks.gpu.rows import Row

#: Seconds after which a test hangs. Time that its file has left may be less.
TEST_S = 150.0
#: Sessions of a file, each of which costs the imports, and seconds without which none begins.
MAX_SESSIONS = 20
LEAST_S = 15.0
#: Statuses of pytest: passed, some failed, no test was selected.
ENDED = (0, 1, 5)


def row_of(path: str, selected: Sequence[str] = (), cases: str = "some") -> Row:
    """Returns the row of a file of tests.

    Args:
        path: path of the file, from the root of the repository.
        selected: arguments of pytest for a dry run.
        cases: "all" for whole products of parameters, else so many that each value is shown.
    """

    def measure(figures: Figures) -> None:
        run_tests(figures, path, selected, cases)

    return Row(path, measure, 10.0, float("inf"))


def left_out(path: str) -> Row:
    """Returns the row of a file that a dry run leaves out."""
    reason = "a dry run takes one file; `make test` runs all of them on the CPU"
    return Row(path, lambda figures: figures.skip(path, reason))


def run_tests(
    figures: Figures, path: str, selected: Sequence[str] = (), cases: str = "some"
) -> None:
    """Runs a file of tests; a test that crashes or hangs does not hide the others."""
    command = [sys.executable, "-m", "pytest", path, "-p", "benchmarks.gpu.outcomes"]
    command += ["-q", "-p", "no:cacheprovider", *(selected if figures.device.is_dry else ())]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="smp-gpu-") as folder:
        file = Path(folder) / "outcomes"
        env = environment(os.environ) | {outcomes.FILE: str(file), "SMP_GRID": cases}
        why = _sessions(figures, command, file, env)
        tell(figures, path, outcomes.read(file), why, time.monotonic() - begin)


def _sessions(
    figures: Figures, command: Sequence[str], file: Path, env: Mapping[str, str]
) -> dict[str, str]:
    """Runs pytest until no test is left; returns names of tests that ended it, with the reason."""
    why: dict[str, str] = {}
    num_known = 0
    for _ in range(MAX_SESSIONS):
        status = _session(figures, command, file, env)
        for name in outcomes.read(file).named("begun"):
            why[name] = "hung" if status is None else f"ended its process ({status})"
            outcomes.note(file, name=name, state="hung" if status is None else "failed")
        before, num_known = num_known, len(outcomes.read(file).of_tests)
        if status == "" or num_known == before or figures.left_s() < LEAST_S:
            break
    return why


def _session(
    figures: Figures, command: Sequence[str], file: Path, env: Mapping[str, str]
) -> str | None:
    """Runs pytest once; returns "" at its end, words if it ended early, None if it was killed."""
    process = subprocess.Popen(command, cwd=REPO, env=env, stdin=subprocess.DEVNULL)
    try:
        size, since = size_of(file), float("inf")  # imports are no test that hangs
        while (status := process.poll()) is None:
            time.sleep(0.05)
            if size_of(file) != size:
                size, since = size_of(file), time.monotonic()
            # Before the part itself is ended, so that other files get their line.
            if figures.left_s() < 5.0 or time.monotonic() - since > TEST_S:
                return None
        return "" if status in ENDED else processes.words_of(status)
    finally:
        processes.end(process)


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Variables of the tests: all samples, and nothing that this process says about itself.

    Plugins that a machine has beside pytest are left alone, and whether there is a device is asked
    of NVML: a process that has asked CUDA cannot use it in its forks.
    """
    paths = [str(REPO / "python"), str(REPO), own.get("PYTHONPATH", "")]
    env = {name: value for name, value in own.items() if name != "SMP_DEVICE"}
    return env | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SMP_SAMPLES": "all",
        "HF_HUB_OFFLINE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def tell(
    figures: Figures, path: str, found: Outcomes, why: Mapping[str, str], seconds: float
) -> None:
    """Figures of a file. One without a test that passed is a failure."""
    failed = found.named("failed")
    named = [f"{name.partition('::')[2]} {why.get(name, '')}".strip() for name in failed]
    figures.add(
        f"{path}: failed",
        len(failed),
        "tests",
        bound=Limit(most=0),
        note=", ".join(named[:5]) + (" ..." if len(named) > 5 else ""),
        failed=failed,
        why=dict(why),
        seconds=seconds,
    )
    skipped, passed = found.named("skipped"), found.named("passed")
    hung = found.named("hung")
    if hung:
        figures.miss(f"{path}: did not end in time", ", ".join(hung))
    not_run = (found.num_tests or 0) - len(found.of_tests)
    if not_run > 0:
        figures.miss(f"{path}: not run", f"{not_run} of {found.num_tests} tests: no time was left")
    bound = Limit(least=0 if hung or not_run else 1)
    figures.add(f"{path}: passed", len(passed), "tests", bound=bound, skipped=len(skipped))
