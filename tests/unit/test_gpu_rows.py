"""Parts of `make gpu` go on behind a row that raises, crashes, hangs or breaks the device."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kernels, processes, share, tests_of, training
from benchmarks.gpu.device import UNNAMED, Device, Named
from benchmarks.gpu.figures import REPO, Figures
from benchmarks.gpu.processes import TimedOut
from benchmarks.gpu.rows import Supervisor, run_rows
from tests.patience import PATIENCE_S, wait_until

CHILD = """
import os, signal, sys
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.gpu.device import Device
from benchmarks.gpu.figures import Figures
from benchmarks.gpu.processes import TimedOut
from benchmarks.gpu.rows import Row, run_rows

is_broken = False

class Fragile(Device):
    name = "a fragile device"
    def answers(self):
        return not is_broken

def fine(figures):
    figures.add("fine", os.getpid(), "")

def raises(figures):
    raise ValueError("one lane")

def crashes(figures):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(figures):
    signal.pause()

def breaks(figures):
    global is_broken
    is_broken = True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def late(figures):
    raise TimedOut("it did not end within 3 s")

def row(work, **options):
    return Row(work.__name__, work, **options)

rows = [row(raises), row(fine), row(crashes), row(fine), row(hangs, limit_s=1.0), row(fine)]
rows += [row(breaks), row(fine), row(late), row(fine, process="other"), row(fine, needed_s=1e9)]
folder, begin, reports = sys.argv[1:]
figures = Figures("graph", Path(folder), Fragile("cpu"), 600.0, is_new=False)
run_rows(figures, rows, int(begin), Connection(int(reports), readable=False))
"""


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "graph.jsonl").read_text().splitlines()]


@pytest.fixture
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'python'}{os.pathsep}{REPO}")


def supervise(folder: Path, text: str) -> None:
    script = folder / "child.py"
    script.write_text(text)
    figures = Figures("graph", folder, Named("cuda"), PATIENCE_S)
    Supervisor(
        figures,
        lambda begin, reports: [sys.executable, str(script), str(folder), str(begin), str(reports)],
    ).run()


def test_every_row_gets_its_line(tmp_path: Path, _imports: None) -> None:
    supervise(tmp_path, CHILD)
    lines = lines_of(tmp_path)
    assert [(line["name"], line["state"]) for line in lines] == [
        ("raises", "failed"),
        ("fine", "ok"),
        ("crashes", "failed"),
        ("fine", "ok"),
        ("hangs", "missed"),
        ("fine", "ok"),
        ("breaks", "failed"),
        ("fine", "ok"),
        ("late", "missed"),
        ("fine", "ok"),
        ("fine", "skipped"),
    ]
    notes = {line["name"]: line["note"] for line in lines}
    assert notes["raises"] == "ValueError: one lane"
    assert notes["crashes"] == "its process ended with signal SIGSEGV; see the log"
    assert "did not end within" in notes["hangs"]
    # An error leaves the process alone; a crash, a hang and a broken device are followed by another
    # one, and so is a row of another process.
    pids = [line["value"] for line in lines if line["value"] is not None]
    assert len(pids) == 5 == len(set(pids))
    assert {line["device"] for line in lines} == {"a fragile device"}


def test_a_part_whose_rows_cannot_be_imported_fails(tmp_path: Path, _imports: None) -> None:
    supervise(tmp_path, "import smp.no_such_module")
    [line] = lines_of(tmp_path)
    assert (line["name"], line["state"]) == ("graph", "failed")
    assert line["note"] == "its process ended with status 1; see the log"
    assert line["device"] == UNNAMED


def test_without_time_the_rows_that_are_left_are_skipped(tmp_path: Path, _imports: None) -> None:
    figures = Figures("graph", tmp_path, Named("cpu"), 0.0)
    supervisor = Supervisor(figures, lambda begin, reports: [sys.executable, "-c", "pass"])
    supervisor._rows = [("first", 1.0), ("second", 1.0)]
    supervisor.run()
    states = [(line["name"], line["state"]) for line in lines_of(tmp_path)]
    assert states == [("first", "missed"), ("second", "skipped")]


def test_a_lane_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(figures: Figures, sizes: share.Sizes, alone: dict[str, Any], lane: str) -> None:
        if lane == "ipc":
            raise RuntimeError("ranks that failed")
        figures.add(lane, 1.0, "ms")

    monkeypatch.setattr(share, "measure", measure)
    monkeypatch.setattr(share, "measured_alone", lambda kind, sizes: {})
    figures = Figures("graph", tmp_path, Device("cpu"), 600.0)
    run_rows(figures, share.rows("share", is_dry=True), 0, Silent())  # type: ignore[arg-type]
    states = [(line["name"], line["state"]) for line in lines_of(tmp_path)]
    assert states == [("host", "ok"), ("ipc", "failed"), ("nccl", "ok")]


class Silent:
    """Reports that no parent reads."""

    def send(self, report: object) -> None:
        pass


# ---- processes -------------------------------------------------------------------------

#: Starts a process in a session of its own, tells its number, and waits.
STARTS = """
import pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                         start_new_session=True)
pathlib.Path(sys.argv[1] + ".new").write_text(str(child.pid))
pathlib.Path(sys.argv[1] + ".new").rename(sys.argv[1])
signal.pause()
"""


def is_over(pid: int) -> bool:
    return pid not in processes.parents()


def test_a_limit_ends_everything_that_a_command_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", STARTS, str(file)])
    wait_until(file.exists, lambda: "no pid", lambda: process.poll() is None)
    processes.end(process)
    wait_until(lambda: is_over(int(file.read_text())), lambda: "the session lives")
    assert process.returncode == -signal.SIGKILL


def test_a_command_that_does_not_end_is_no_failure_of_its_own() -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(TimedOut, match="did not end within 1 s"):
        processes.run(command, 1.0, dict(os.environ), None)
    assert processes.run([sys.executable, "-c", "exit(3)"], PATIENCE_S, {}, None) == 3
    assert processes.words_of(3) == "status 3" and processes.words_of(-6) == "signal SIGABRT"


def test_orphans_are_ended_with_the_part(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = (
        "import os, subprocess, sys\n"
        "from benchmarks.gpu import processes\n"
        "processes.adopt_orphans()\n"
        "parent = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]])\n"
        "while not os.path.exists(sys.argv[2]): pass\n"
        "parent.kill()\n"
        "parent.wait()\n"
        "processes.end_descendants(os.getpid())\n"
    )
    command = [sys.executable, "-c", program, STARTS, str(file)]
    subprocess.run(command, cwd=REPO, check=True, timeout=PATIENCE_S)
    wait_until(lambda: is_over(int(file.read_text())), lambda: "the orphan lives")


# ---- tests -----------------------------------------------------------------------------

TESTS = """
import os, signal, pytest

def test_first(): pass
def test_fails(): assert False
def test_aborts(): os.abort()
def test_after_a_crash(): pass
def test_hangs(): signal.pause()
@pytest.mark.skip(reason="here")
def test_skipped(): pass
def test_last(): pass
"""


def test_a_test_that_crashes_or_hangs_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests_of, "TEST_S", 5.0)
    file = tmp_path / "test_made.py"
    file.write_text(TESTS)
    tests_of.run_tests(Figures("graph", tmp_path, Device("cpu"), PATIENCE_S), str(file))
    lines = {line["name"].removeprefix(f"{file}: "): line for line in lines_of(tmp_path)}
    assert lines["failed"]["value"] == 2 and lines["failed"]["state"] == "failed"
    assert lines["failed"]["note"] == "test_fails, test_aborts ended its process (signal SIGABRT)"
    assert lines["passed"]["value"] == 3 and lines["passed"]["detail"] == {"skipped": 1}
    assert lines["did not end in time"]["state"] == "missed"
    assert lines["did not end in time"]["note"].endswith("::test_hangs")
    assert "not run" not in lines


def test_a_file_that_cannot_be_collected_fails_once(tmp_path: Path) -> None:
    file = tmp_path / "test_made.py"
    file.write_text("import no_such_module")
    tests_of.run_tests(Figures("graph", tmp_path, Device("cpu"), PATIENCE_S), str(file))
    lines = {line["name"].removeprefix(f"{file}: "): line for line in lines_of(tmp_path)}
    assert lines["passed"]["state"] == "failed" and lines["passed"]["bound"] == ">= 1"


def test_operators_are_tested_in_whole_products_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(
        tests_of, "_sessions", lambda figures, command, file, env: seen.append(env) or {}
    )
    figures = Figures("graph", tmp_path, Device("cpu"), 60.0)
    for rows in (kernels.rows("kernels", False), training.rows("training", False)):
        rows[0].measure(figures)
    assert [env["SMP_GRID"] for env in seen] == ["all", "some"]
    assert {env["SMP_SAMPLES"] for env in seen} == {"all"}


def test_tests_of_a_machine_have_its_pytest_and_no_network() -> None:
    env = tests_of.environment({"SMP_DEVICE": "cpu", "PATH": "/bin"})
    assert "SMP_DEVICE" not in env and env["PATH"] == "/bin"
    assert env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1" and env["HF_HUB_OFFLINE"] == "1"


#: Fails where a process that is forked later has asked CUDA for its devices.
ASKS_NOTHING = """
import torch

def refuse(*arguments):
    raise AssertionError("CUDA was asked; forks of this process cannot use it")

torch._C._cuda_getDeviceCount = torch._C._cuda_init = refuse
from tests.dist.zygote import preload
preload()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is not None,
    reason="torchao is installed, which transformers imports, and which asks CUDA for a device "
    "meanwhile; requirements/test.txt leaves it out",
)
def test_the_process_that_ranks_are_forked_from_has_not_asked_cuda() -> None:
    env = tests_of.environment(os.environ)
    subprocess.run([sys.executable, "-c", ASKS_NOTHING], env=env, check=True, timeout=PATIENCE_S)
