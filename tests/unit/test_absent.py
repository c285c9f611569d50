"""Tests are skipped for absent packages only where a file of the tests imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.absent import REPO, missing_from, missing_package

ABSENT = {"absent_here"}
RANK = """Traceback (most recent call last):
  File "{path}", line 3, in train
    from absent_here.models import Model
ModuleNotFoundError: No module named 'absent_here'
"""


def _imports(path: Path, package: str = "absent_here") -> ModuleNotFoundError:
    code = compile(f"import {package}.models", str(path), "exec")
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(code)
    return caught.value


def test_what_a_test_imports_may_be_absent() -> None:
    assert missing_from(_imports(REPO / "tests" / "unit" / "any.py"), ABSENT) == "absent_here"
    text = RANK.format(path=REPO / "tests/dist/any.py")
    assert missing_package(text, ABSENT) == "absent_here"
    assert missing_from(AssertionError(text), ABSENT) == "absent_here"


@pytest.mark.parametrize("path", [REPO / "benchmarks" / "any.py", "<string>"])
def test_what_a_benchmark_or_a_program_of_a_test_imports_may_be_absent(path: Path | str) -> None:
    assert missing_from(_imports(Path(path)), ABSENT) == "absent_here"
    text = RANK.format(path=path)
    assert missing_package(text, ABSENT) == "absent_here"
    assert missing_package(text.replace("\n", "\n  "), ABSENT) == "absent_here"


def test_what_another_rank_tells_of_counts() -> None:
    told = (
        "rank 2 raised: ModuleNotFoundError: No module named 'absent_here'\n\nAt:\n  {}(7): forward"
    )
    assert missing_package(told.format(REPO / "tests/reference/any.py"), ABSENT) == "absent_here"
    assert missing_package(told.format(REPO / "python/smp/any.py"), ABSENT) is None
    assert missing_package(told.format(REPO / "tests/reference/any.py"), {"another"}) is None


def test_a_launcher_without_its_store_may_be_absent() -> None:
    text = (
        '  File "/usr/lib/torch/distributed/run.py", line 9, in run\n'
        "RuntimeError: use_libuv was requested but PyTorch was build without libuv support"
    )
    assert missing_package(text, {"libuv"}) == "libuv"
    assert missing_package(text, ABSENT) is None
    assert missing_package(text.replace("torch/distributed/run.py", "smp"), {"libuv"}) is None


def test_what_it_was_raised_from_counts() -> None:
    def raised_from(path: Path) -> BaseException:
        with pytest.raises(RuntimeError) as caught:
            raise RuntimeError("the trace failed") from _imports(path)
        return caught.value

    assert missing_from(raised_from(REPO / "tests" / "unit" / "any.py"), ABSENT) == "absent_here"
    assert missing_from(raised_from(Path(sys.prefix) / "smp" / "any.py"), ABSENT) is None


def test_what_the_library_imports_may_not() -> None:
    inside = Path(sys.prefix) / "smp" / "nn" / "any.py"
    assert missing_from(_imports(inside), ABSENT) is None
    assert missing_package(RANK.format(path=inside), ABSENT) is None


def test_what_is_not_named_may_not() -> None:
    path = REPO / "tests" / "unit" / "any.py"
    assert missing_from(_imports(path, "also_absent"), ABSENT) is None
    assert missing_from(ValueError("No module named 'absent_here'"), ABSENT) is None
    assert missing_from(_imports(path)) is None


CONFTEST = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(REPO)!r})
from tests import absent

absent.REPO = Path(__file__).parent


def pytest_configure(config):
    config.pluginmanager.register(absent.SkipsWithoutPackages())
"""


@pytest.mark.parametrize("place", ["module", "function"])
@pytest.mark.parametrize("named", [True, False])
def test_a_session_skips_and_says_why(tmp_path: Path, place: str, named: bool) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        {
            "module": "import absent_here\n\ndef test_it(): pass\n",
            "function": "def test_it():\n    import absent_here\n",
        }[place]
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "tests"],
        cwd=tmp_path,
        env={**os.environ, "SMP_TEST_WITHOUT": "absent_here" if named else "another"},
        capture_output=True,
        text=True,
    )
    assert ("1 skipped" in ended.stdout) == named, ended.stdout
    assert ("absent_here is absent" in ended.stdout) == named
    assert (ended.returncode in (0, 5)) == named
