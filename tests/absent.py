"""Tests that import a package which is known to be absent are skipped, and counted.

``SMP_TEST_WITHOUT=transformers,peft`` names such packages: those that a distribution does not have.
Only what a file of ``tests``, ``benchmarks`` or ``examples`` imports counts, or a program that a
test gives to ``python -c``, or a package that such a file imports:
smp itself has to get along without them, so its own failure to import one stays a failure.
``libuv`` names the launcher, and the groups at an address, of a PyTorch that is built without it.
Without the variable nothing is skipped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
ABSENT = frozenset(filter(None, os.environ.get("SMP_TEST_WITHOUT", "").split(",")))

# pytest indents what an assertion says from its second line on.
_MISSING = re.compile(r"^E?\s*ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line \d+')
# An exception's text as pybind11 passes it to another rank.
_TOLD = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'\s+At:\s+(\S+)\(\d+\): ")


def missing_package(text: str, absent: Iterable[str] = ABSENT) -> str | None:
    """The absent package for which alone a test failed, by the traceback of a rank.

    Args:
        text: holds what Python prints; the innermost file of the import counts.
        absent: packages that may be missing.
    """
    for match in _MISSING.finditer(text):
        package = match[1].partition(".")[0]
        files = [f for f in _FRAME.findall(text[: match.start()]) if not f.startswith("<frozen")]
        if package in absent and files and _is_of_tests(files[-1]):
            return package
    for match in _TOLD.finditer(text):
        package = match[1].partition(".")[0]
        if package in absent and _is_of_tests(match[2]):
            return package
    is_torchs = any(f"torch/distributed/{name}.py" in text for name in ("run", "rendezvous"))
    lacks_libuv = is_torchs and "build without libuv support" in text
    return "libuv" if "libuv" in absent and lacks_libuv else None


def missing_from(error: BaseException, absent: Iterable[str] = ABSENT) -> str | None:
    """Returns the missing package of an exception of this process, or of its causes."""
    raised: BaseException | None = error
    while raised is not None:
        if isinstance(raised, ModuleNotFoundError):
            package = (raised.name or "").partition(".")[0]
            files = [name for name in _files_of(raised) if not name.startswith("<frozen")]
            return package if package in absent and files and _is_of_tests(files[-1]) else None
        raised = raised.__cause__
    return missing_package(str(error), absent)


def _files_of(error: BaseException) -> Iterator[str]:
    frame = error.__traceback__
    while frame is not None:
        yield frame.tb_frame.f_code.co_filename
        frame = frame.tb_next


def _is_of_tests(name: str) -> bool:
    folders = (REPO / folder for folder in ("tests", "benchmarks", "examples"))
    return name == "<string>" or any(folder in Path(name).parents for folder in folders)


class SkipsWithoutPackages:
    """A plugin, registered where the variable is set."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        outcome = yield
        report = outcome.get_result()
        if report.failed and call.excinfo is not None:
            package = missing_from(call.excinfo.value)
            if package is not None:
                _skip(report, item.location, package)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        outcome = yield
        report = outcome.get_result()
        if report.failed:
            package = missing_from(report.call.excinfo.value)  # pytest wraps that of an import
            if package is not None:
                _skip(report, (str(collector.path), 0, ""), package)


def _skip(report: Any, location: tuple[str, int | None, str], package: str) -> None:
    report.outcome = "skipped"
    report.longrepr = (location[0], location[1] or 0, f"Skipped: {package} is absent")


if ABSENT & sys.stdlib_module_names or ABSENT & {"torch", "smp"}:
    raise ValueError(f"SMP_TEST_WITHOUT names {sorted(ABSENT)}; smp needs some of them")
