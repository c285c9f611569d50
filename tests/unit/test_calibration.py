"""``benchmarks/calibration.py`` measures what ``smp plan --hardware`` reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from smp_cli import cores

from smp.planning import hardware
from tests.conftest import REPO

SCRIPT = REPO / "benchmarks" / "calibration.py"


@pytest.fixture
def calibration(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Scripts of that folder import each other by their names."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import calibration

    return calibration


@pytest.mark.sample(keep=0)  # a minute or two
@pytest.mark.parametrize("name", ["here.json"])
def test_calibration_is_hardware_for_a_plan(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    command = [sys.executable, str(SCRIPT), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = hardware.load(str(file))
    assert json.loads(done.stdout) == found.to_json()
    assert found.at_once == found.devices_per_host == cores.usable_cores()
    assert found.flops_per_byte("fp32") > 0 and found.inside.latency_s > 0
    # Processor time of one core: an element of a small transformer takes nanoseconds. What other
    # work on the machine has made immeasurable is named.
    overheads = found.overheads
    assert overheads is not None and found.collective is not None
    for key, largest_s in (
        ("microbatch_element_s", 1e-7),
        ("update_element_s", 1e-7),
        ("call_s", 1e-1),
    ):
        lost_in_noise = f"overheads.{key} came out as" in done.stderr
        assert lost_in_noise == (getattr(overheads, key) == 1e-12)
        assert getattr(overheads, key) < largest_s
    assert overheads.crowded >= 1


def test_measurements_make_a_hardware_file(
    calibration: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = {"bytes_per_s": 4e9, "latency_s": 1e-5}
    measured: dict[str, Any] = {
        "rates": {"flops": {"fp32": 1e11}, "moved": 1e10, "copied": 5e9, "alone": 1.25},
        "messages": link,
        "sums": {"byte s": 1e-9},
        "training": {"microbatch s": 3e-9, "update s": -1e-9},
        "calls": {"call s": 1e-4, "microbatch s": 2e-3},
    }

    def measure(kind: str, size: int, *, shared_memory: bool = True, text: str = "") -> Any:
        if kind != "pipeline":
            return measured[kind]
        assert hardware.read(text, "known").overheads is not None
        return {"measured s": 0.75 * size, "predicted s": size if size == 2 else 2.0}

    monkeypatch.setattr(calibration, "_measure", measure)
    monkeypatch.setattr(calibration, "usable_cores", lambda: 2)
    found = hardware.read(json.dumps(calibration.calibrate()), "here")
    assert (found.at_once, found.devices_per_host, found.rate("fp32")) == (2, 2, 1e11)
    assert found.inside == found.between == hardware.Link(**link)
    assert found.collective is not None and found.collective.latency_s == 1e-5
    assert found.collective.bytes_per_s == pytest.approx(1e9)  # one of two sends what it has
    # A busy machine's measurement below zero counts as almost zero. The last value is 1.5 / 0.75:
    # measured over predicted seconds with too many ranks, by the same with one rank per core.
    assert found.overheads == hardware.Overheads(3e-9, 1e-12, 1e-4, 2e-3, 1.25, 2.0)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "overheads.update_element_s came out as -1e-09 s" in said[0]


def test_ranks_measure_a_link(calibration: ModuleType) -> None:
    found = calibration._measure("messages", 2)
    assert 0 < found["latency_s"] < 1 and found["bytes_per_s"] > 1e6


def test_calibration_into_no_folder_is_bad_use(
    calibration: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["calibration.py", str(tmp_path / "no" / "here.json")])
    assert calibration.main() == 2
    assert "usage: calibration.py FILE" in capsys.readouterr().err
