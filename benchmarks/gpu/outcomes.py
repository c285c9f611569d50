"""A plugin of pytest: each outcome is a JSON line at once, so that a crash or a limit loses none.

``pytest -p benchmarks.gpu.outcomes``, with the file in `FILE`. Tests that have a line in it are not
run again. A session whose device answers no more ends; the next one goes on.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

#: Variable with the path of the file.
FILE = "GPU_OUTCOMES"
#: Status of a session that ended because its device answers no more.
BROKEN = 90


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of tests by name: "begun", "passed", "skipped" or "failed".

    Attributes:
        num_tests: number of tests that were to run; None if pytest did not get to count them.
    """

    of_tests: dict[str, str]
    num_tests: int | None

    def named(self, state: str) -> list[str]:
        return [name for name, own in self.of_tests.items() if own == state]


def read(path: Path) -> Outcomes:
    """Reads the file. The last line of a test counts, but a failure stays one."""
    of_tests: dict[str, str] = {}
    num_tests = None
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        if "tests" in line:
            num_tests = line["tests"] if num_tests is None else num_tests
        elif of_tests.get(line["name"]) != "failed":
            of_tests[line["name"]] = line["state"]
    return Outcomes(of_tests, num_tests)


def note(path: Path, **line: object) -> None:
    """Appends a line."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _note(**line: object) -> None:
    note(Path(os.environ[FILE]), **line)


def _answers() -> bool:
    """Returns whether the device, if this process uses it, still does what it is asked."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@pytest.hookimpl(trylast=True)  # behind the choice of a sample
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _note(tests=len(items))
    done = read(Path(os.environ[FILE])).of_tests
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(name=nodeid, state="begun")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed" or report.when == "call":
        _note(name=report.nodeid, state=report.outcome)


def pytest_runtest_logfinish() -> None:
    if not _answers():
        pytest.exit("the device answers no more in this process", BROKEN)
