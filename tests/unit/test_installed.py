"""Processes that tests start import the installed smp where it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.installed import REPO, python_path


@pytest.mark.parametrize("installed", [True, False])
def test_the_checkout_comes_first_unless_the_package_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setenv("SMP_TEST_INSTALLED", "1" if installed else "")
    own = [] if installed else [str(REPO / "python")]
    assert python_path().split(os.pathsep) == (own or [""])
    assert python_path("", Path("a"), "b").split(os.pathsep) == [*own, "a", "b"]


def test_no_other_file_of_the_tests_names_the_checkout_as_a_path_of_python() -> None:
    naming = {
        path.relative_to(REPO / "tests").as_posix()
        for path in (REPO / "tests").rglob("*.py")
        if 'str(REPO / "python")' in path.read_text()
    }
    assert naming == {"conftest.py", "unit/test_installed.py"}
